"""What holds for all tests: the device that torchtitan settles on, threads, signals, no clocks, the order of files."""

import gc
import signal

import hypothesis
import torch

from titanplans.training.trainer.device import no_trainer, prepare_device

if no_trainer() is None:
    prepare_device()
else:  # as on torch 2.11, where everything else runs
    collect_ignore = [
        "training",
        "docs",
        "cli/test_sweep_run.py",
        "cli/test_sweep_results.py",
        "test_torchrun.py",
    ]
# Tensors here are tiny, and ranks have processes of their own: a second thread only waits, on a core that is busy.
torch.set_num_threads(1)
# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP; a program that tests start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # which a new program does not inherit
# A property is true or false; how long an example takes says something of the machine alone.
hypothesis.settings.register_profile("titanplans", deadline=None)
hypothesis.settings.load_profile("titanplans")

LONGEST = (
    "proof_holds",
    "compile_architectures",
    "train_cli",
    "survival",
    "checkpoint_jobs",
    "compile",
    "combinations",
    "mutants",
    "parallelism_report",
    "worlds",
    "float8_parallel",
    "verify_command",
    "fsdp",
    "proofs",
    "trainer",
    "async_tp_command",
    "sweep_run",
)
"""Files of half a minute and more. Where workers take whole files, these go first, so that none is left at the end."""


def pytest_collection_modifyitems(items):
    first = [f"test_{name}" for name in LONGEST]
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))


def pytest_collection_finish():
    """What was imported stays: a collection that looks through all of it takes half a second, and tests cause hundreds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_unconfigure():
    """Let nanobind's modules be freed: it lists every function of theirs that is not."""
    gc.unfreeze()
