"""`load_weights` with the name of a repository, from a hub on this machine and from the cache; `save_weights` with one."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file

from tests import zoo
from tests.support import process_groups
from tests.support.hub_server import hub_server, use_hub
from tests.support.refusals import refusal, refusal_or_none
from tests.support.step_comparison import full_copy
from titanplans import load_weights, modeling, save_weights
from titanplans.parallel import Degrees, FSDP2Config, ParallelManager

NOWHERE = "http://127.0.0.1:9"
"""An address at which nothing listens."""


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch, cache):
    with hub_server() as hub:
        use_hub(monkeypatch.setattr, hub.address, cache)
        yield hub


@pytest.fixture
def published(hub, tmp_path):
    """Publish a Llama as ada/tiny, in two files of weights; return its folder."""
    folder = tmp_path / "published"
    zoo.build("llama", dtype=torch.float32, options=False).save_pretrained(folder, max_shard_size="100KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    hub.publish("ada/tiny", folder)
    return folder


def empty(folder):
    model = modeling.build(modeling.load_config_file(folder)).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def assert_loaded(tensors, folder):
    expected = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert expected.keys() <= tensors.keys()
    for name in expected:
        assert torch.equal(tensors[name], expected[name]), name


def test_the_weights_of_a_repository_are_loaded_from_the_hub_and_then_from_the_cache(
    hub, published, monkeypatch, cache
):
    from huggingface_hub import constants

    load_weights(model := empty(published), "ada/tiny")
    assert_loaded(model.state_dict(), published)
    downloads = [*hub.downloads]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    use_hub(monkeypatch.setattr, NOWHERE, cache)
    commit = hub.revisions["ada/tiny", "main"]
    for name in ("ada/tiny", f"ada/tiny@{commit}"):
        load_weights(model := empty(published), name)
        assert_loaded(model.state_dict(), published)
    assert hub.downloads == downloads


def test_a_repository_that_can_not_be_loaded_is_refused(hub, published):
    message = refusal(load_weights, empty(published), "ada/none")
    assert message.startswith("load_weights('ada/none'): there is no such folder, and no such repository")
    for file in published.glob("*.safetensors*"):
        file.unlink()
    hub.publish("ada/tiny", published)
    message = refusal(load_weights, empty(published), "ada/tiny")
    assert message.startswith("load_weights('ada/tiny'): the repository has no model.safetensors at commit")


def test_folders_are_saved_on_this_machine_and_come_before_repositories(
    hub, published, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    message = refusal(save_weights, empty(published), "ada/tiny@v1")
    assert "name a folder, such as './ada/tiny@v1', and push it with hf upload ada/tiny FOLDER" in message
    model = empty(published)
    for parameter in model.parameters():
        parameter.data.fill_(2.0)
    save_weights(model, "ada/tiny")
    load_weights(loaded := empty(published), "ada/tiny")
    assert all(bool((parameter == 2.0).all()) for parameter in loaded.parameters())
    assert hub.downloads == []


def load_on_rank(rank, address, cache, folder):
    """Load a split model; return its full tensors, and the error for a repository that does not exist."""
    use_hub(setattr, address, cache)
    manager = ParallelManager(FSDP2Config(), Degrees(tp=2), device_type="cpu")
    model = manager.parallelize(modeling.build(modeling.load_config_file(folder)))
    manager.to_empty()
    error = refusal_or_none(load_weights, model, "ada/none")
    errors = [None, None]
    torch.distributed.all_gather_object(errors, error)
    load_weights(model, "ada/tiny")
    return {name: full_copy(value) for name, value in model.state_dict().items()}, errors


def test_ranks_download_a_repository_once_and_all_refuse_one_that_does_not_exist(hub, published, cache):
    run = functools.partial(load_on_rank, address=hub.address, cache=cache, folder=published)
    tensors, errors = process_groups.run(run, 2)
    assert_loaded(tensors, published)
    assert errors[0] == errors[1]
    assert "no such repository on the Hub" in errors[0]
    index = json.loads((published / "model.safetensors.index.json").read_text())
    files = [name for name in hub.downloads if name.endswith(".safetensors")]
    assert sorted(files) == sorted(set(index["weight_map"].values()))
