"""The example package of a user's model, installed next to titanplans, is listed, proved and trained."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.jobs import output
from tests.support.paths import ROOT
from tests.support.refusals import refusal
from titanplans.errors import ModelError

pytestmark = pytest.mark.thorough

EXAMPLE = ROOT / "examples" / "out_of_tree"
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist')"
JOB = """
[model]
class = "my_models.model:MyModel"
arguments = { width = 32, heads = 4, layers = 2 }
[training]
steps = 2
local_batch_size = 1
seq_len = 32
[parallelism]
tensor_parallel_degree = 2
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with the example's jobs, and its package installed in `site`."""
    folder = tmp_path_factory.mktemp("out_of_tree")
    shutil.copytree(
        EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    )
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder / "source", check=True, capture_output=True)
    (wheel,) = (folder / "source" / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    shutil.copy(EXAMPLE / "job.toml", folder)
    (folder / "own.toml").write_text(JOB)
    return folder


def install():
    site = str(Path.cwd() / "site")
    sys.path.insert(0, site)
    os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])  # for the ranks


def is_listed_and_proved(arguments):
    install()
    from titanplans.cli.verify.main import main
    from titanplans.config import load_job
    from titanplans.training.job.resolve import hf_config

    assert main(["list"]) == main(["list", "my_model"]) == 0
    assert main(["verify", "my_model", "--quick"]) == 0
    assert main(["verify", "own.toml", "--quick"]) == 0
    assert hf_config(load_job(["job.toml"])).own_arguments == {"width": 128}


def is_decided(arguments):
    install()
    from titanplans.cli.verify.main import main

    assert main(["async-tp", "own.toml", "--seq-len", "32", "--batch-size", "1"]) == 0


def trains(arguments):
    install()
    from titanplans.cli.main import run

    run(["train", "own.toml"])


def test_the_package_is_listed_and_proved(installed):
    out = output([], installed, is_listed_and_proved)
    assert "my_models.plans:MyPlan" in out
    assert "packed: 'qkv_proj'; parameters of the mixer itself: 'decay'" in out
    assert out.count(" cases right") == 2


def test_async_tp_is_decided(installed):
    """The example's weights stay on the meta device until the model is split, like the weights of transformers' models."""
    out = output([], installed, is_decided)
    assert "2 x Block (Mixer, MLP), 1 graph" in out
    assert re.search(r"forward +all-gather .*  fused with mixer.qkv_proj", out)


def test_the_package_trains_on_two_ranks(installed):
    assert re.search(r"step +2  loss", output([], installed, trains))


@pytest.fixture
def user_model_config(installed, monkeypatch):
    """Return the function `user_model_config`, with the example's package on sys.path."""
    from titanplans.modeling import user_model_config

    monkeypatch.syspath_prepend(installed / "site")
    return user_model_config


@pytest.mark.parametrize(
    ("value", "arguments", "message"),
    [
        ("my_models.model", {}, "model.class = 'my_models.model'.*write module:attribute"),
        ("my_models.model:Mixin", {}, r"model.class = .*has no Mixin; did you mean Mixer\? \(.*model.py\)"),
        ("no_models.model:MyModel", {}, "model.class = .*no module named 'no_models'"),
        ("my_models.model:MyModel", {"depth": 3}, r"model.arguments = \{'depth': 3\}: TypeError: .*'depth'"),
    ],
)
def test_a_class_that_can_not_be_imported_is_refused_in_one_line(
    user_model_config, value, arguments, message
):
    assert re.search(message, refusal(user_model_config, value, arguments, kind=ModelError))


def test_a_misspelt_keyword_in_a_file_of_sizes_is_named_with_the_file(user_model_config):
    """The error names the nearest keyword and the line of the constructor, but no file of titanplans."""
    message = refusal(
        user_model_config,
        "my_models.model:MyModel",
        {"widht": 64},
        "sizes.toml, flavor 'debug'",
        kind=ModelError,
    )
    assert message.startswith("sizes.toml, flavor 'debug': class = 'my_models.model:MyModel'")
    assert "unexpected keyword argument 'widht'; did you mean width?" in message
    assert re.search(r"my_models/model.py, line \d+\)$", message)
    assert "own.py" not in message
