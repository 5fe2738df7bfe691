"""Installed versions are compared with tested ones: constraints.txt, --version, and the last line of an error."""

import os
import re

import pytest

from tests.support.constraints import stale
from tests.support.paths import ROOT
from tests.support.programs import run_python
from titanplans.errors import ModelError
from titanplans.versions import describe_untested, versions

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
[project]
dependencies = ["torch==2.13.0", "flash-linear-attention>=0.6,<0.7"]
[project.optional-dependencies]
dev = ["uv>=0.13"]
"""
PINS = "# by make lock\nflash_linear_attention==0.6.0\nsetuptools==84.0\ntorch==2.13.0\nuv==0.13.9 ; python_version < '4'\n"


def test_the_constraints_satisfy_the_requirements_of_the_project():
    assert stale((ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text()) is None


def test_make_test_light_installs_the_oldest_torch_of_the_range():
    (line,) = re.findall(r'"torch>=([0-9.]+),<[0-9.]+", +# DTensor', (ROOT / "pyproject.toml").read_text())
    assert f"LIGHT_TORCH  := torch=={line}.0\n" in (ROOT / "Makefile").read_text()


def test_constraints_have_versions_and_no_locations():
    """Each line is a package's version, without a file, an index, or a hash, which differs between builds of torch."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    assert all(line.partition(" ")[0].count("==") == 1 for line in lines)
    assert not any(word in (ROOT / "constraints.txt").read_text() for word in ("--", "://", "@", "+cpu"))


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        (PINS, None),
        (PINS.replace("uv==0.13.9", "uw==0.13.9"), "it has no uv"),
        (PINS.replace("setuptools", "setup"), "it has no setuptools"),
        (PINS.replace("0.6.0", "0.7.1"), "it has flash-linear-attention 0.7.1, and pyproject.toml asks for <0.7,>=0.6"),
        (PINS + "uv==0.12.0 ; python_version >= '4'\n", "it has uv 0.12.0, and pyproject.toml asks for >=0.13"),
    ],
)  # fmt: skip
def test_stale_constraints_are_reported(pins, reason):
    assert stale(PROJECT, pins) == reason


@pytest.fixture
def newer(tmp_path, monkeypatch):
    """Return a folder on sys.path with metadata of transformers 99."""
    written = tmp_path / "transformers-99.0.0.dist-info" / "METADATA"
    written.parent.mkdir()
    written.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def raised(cause: Exception | None = None):
    """Return an error that is raised inside transformers, or `cause` after it is raised in this file."""
    from transformers import AutoConfig

    try:
        if cause is not None:
            raise cause
        AutoConfig.for_model("none")
    except (ValueError, ImportError) as error:
        return error


def test_an_untested_version_is_marked_and_named_in_errors(newer):
    assert "transformers 99.0.0 (tested: " in versions()
    description = describe_untested(raised())
    assert description.startswith(" (transformers 99.0.0 was not tested, <")
    assert describe_untested(raised(ImportError("no Cache", name="transformers.cache_utils"))) == description
    assert describe_untested(raised(ModelError("a refusal"))) == ""
    refusal = ModelError("it does not run")
    refusal.__cause__ = raised()
    assert describe_untested(refusal) == description
    refusal.__cause__.__context__ = refusal
    assert describe_untested(refusal) == description


def test_a_library_without_metadata_is_not_named(monkeypatch):
    """A clone on PYTHONPATH has no metadata, for example."""
    monkeypatch.setattr("titanplans.versions._DISTRIBUTIONS", {"transformers": "no-such-distribution"})
    assert versions().endswith(", no-such-distribution of no known version")
    assert describe_untested(raised()) == ""


def test_tested_versions_are_not_named():
    assert "tested" not in versions()
    assert describe_untested(raised()) == ""


def test_an_error_ends_with_the_version(newer, tmp_path):
    """The traceback of the library is unchanged, and its last line names the version."""
    (tmp_path / "broken.py").write_text(
        "from transformers import AutoConfig\nimport titanplans.cli.main as commands\n"
        "commands.main = lambda argv: AutoConfig.for_model('none')\ncommands.run(['list'])\n"
    )
    ended = run_python("broken.py", cwd=tmp_path, env={"PYTHONPATH": f"{newer}{os.pathsep}{ROOT}"})
    assert ended.returncode == 1
    assert "ValueError: Unrecognized model identifier" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("transformers 99.0.0 was not tested, <")
