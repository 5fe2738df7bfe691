"""The folder of each architecture of `zoo.FURTHER`, loaded into a model split over two ranks and saved again."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import zoo
from tests.support import process_groups
from titanplans import Degrees, FSDP2Config, ParallelManager, UserError, kernels, load_weights, modeling
from titanplans.weights.save import save_weights

pytestmark = pytest.mark.thorough


def round_trips(rank, folder):
    """Return the error of each architecture; "" if there is none."""
    kernels.install("cpu")
    errors = {}
    for name in zoo.FURTHER:
        manager = ParallelManager(FSDP2Config(), Degrees(tp=2), device_type="cpu")
        try:
            model = modeling.build(modeling.load_config_file(folder / name))
            manager.parallelize(model)
            manager.to_empty()
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
            load_weights(model, folder / name)
            save_weights(model, folder / "saved" / name)
        except (UserError, RuntimeError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
        else:
            errors[name] = ""
    return errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def errors(folder):
    for name in zoo.FURTHER:
        zoo.build(name, dtype=torch.float32).save_pretrained(folder / name)
    return process_groups.run(partial(round_trips, folder=folder), ranks=2)


def tensors(folder: Path):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", zoo.FURTHER)
def test_a_saved_folder_equals_the_loaded_one(folder, errors, name):
    assert errors[name] == ""
    expected, saved = tensors(folder / name), tensors(folder / "saved" / name)
    assert saved.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(saved[key], value)] == []
