"""Commands hide known warnings of other libraries that do not matter, and show all others."""

import logging
import warnings

import pytest

from tests.support.programs import run_python
from titanplans import quiet

COMMANDS = {
    "list": ["list"],
    # Together these commands cause all known warnings of torchao, torch, FLA and transformers.
    "list models": [
        "list",
        "gla",
        "mamba",
        "mamba2",
        "mamba3",
        "log_linear_mamba2",
        "comba",
        "rwkv7",
        "rodimus",
    ],
    "verify": ["verify", "mamba2", "--tp", "2", "--quick"],
    "train": ["train", "configs/gla_debug.toml", "--training.steps", "1", "--job.dump_folder"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_leaves_stderr_empty(name, tmp_path):
    argv = [*COMMANDS[name], *([str(tmp_path)] if name == "train" else [])]
    done = run_python("-m", "titanplans", *argv)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.thorough
def test_benchmarks_leave_stderr_empty(tmp_path):
    """Benchmarks exit without freeing Triton's objects, for which nanobind would print leaks."""
    code = "import benchmarks, torchao.float8, fla.layers, triton; from benchmarks.gpu_day import finish; finish(3)"
    done = run_python("-c", code)
    assert (done.stderr, done.returncode) == ("", 3)


@pytest.fixture
def silenced(monkeypatch):
    """Undo `quiet.silence`, which is permanent in a program."""
    loggers = [logging.getLogger(name) for name in (*quiet._HIDDEN_RECORDS, *quiet._TRAINING_RECORDS)]
    for logger in loggers:
        monkeypatch.setattr(logger, "filters", [])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        yield shown


@pytest.mark.parametrize("training", [False, True])
def test_other_messages_are_shown(silenced, caplog, training):
    quiet.silence(training=training)
    for message in ("Failed to load x.so: no such file", "float8 has changed its meaning"):
        logging.getLogger("torchao").warning(message)
    assert caplog.messages == ["float8 has changed its meaning"]
    for message in (
        "Triton is not supported on current platform, roll back to CPU.",
        "Triton has found no GPU",
    ):
        warnings.warn(message, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in silenced] == ["Triton has found no GPU"]


def test_a_training_shows_once_a_warning_that_matters(silenced, caplog):
    quiet.silence(training=True)
    for layer in range(3):
        message = "Mamba2 does not recommend using Triton's conv1d backend, as it is untested"
        logging.getLogger("fla.layers.mamba2").warning(message)
        logging.getLogger("fla.layers.mamba2").warning("layer %d has no state", layer)
    assert len(caplog.messages) == 4
