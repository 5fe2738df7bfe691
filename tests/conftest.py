"""Settings for all tests: threads, signals, hypothesis, garbage collection, and the order of the files."""

import gc
import os
import signal

import hypothesis
import pytest
import torch

from titanplans.training.trainer.device import no_trainer

collect_ignore = []
if no_trainer() is not None:  # on torch 2.11, with which only the trainer can't run
    collect_ignore += ["training", "docs", "cli/test_data.py", "cli/test_sweep.py", "test_torchrun.py"]
if os.environ.get("TRITON_INTERPRET") != "1":  # make test-kernels sets it
    collect_ignore += ["kernels/interpreted"]
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers, and printed tables are wrapped to it
# The tensors are tiny, and ranks are threads or processes, so more threads would only compete for the cores.
torch.set_num_threads(1)
# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. Child processes inherit ignored signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Install a handler instead of ignoring the signal: exec resets a handler, but keeps a signal ignored.
    signal.signal(signal.SIGHUP, lambda *_: None)
# By default hypothesis fails slow examples, but on a busy machine slowness says nothing about the property.
hypothesis.settings.register_profile("titanplans", deadline=None)
hypothesis.settings.load_profile("titanplans")


@pytest.fixture(scope="session")
def cpu_kernels():
    """Install the PyTorch stand-ins for FLA's kernels.

    They stay installed; a test that needs FLA's own kernels starts a new process.
    """
    from titanplans import kernels

    kernels.install("cpu")


# This runs before -m deselects tests, so that the order of the files does not depend on -m.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Run the files with thorough tests first, so that no worker is left with a long file at the end."""
    long = {item.path for item in items if item.get_closest_marker("thorough")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish():
    """Freeze imported objects, because a garbage collection over them takes half a second, and tests cause hundreds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_unconfigure():
    """Unfreeze, so that nanobind's modules are freed; otherwise nanobind prints every function that leaks."""
    gc.unfreeze()
