"""What holds for all tests: the device that torchtitan settles on when it is imported, threads, no clocks, the order."""

import hypothesis
import torch

from titanplans.training.device import prepare_device

prepare_device()
# Tensors here are tiny, and ranks have processes of their own: a second thread only waits, on a core that is busy.
torch.set_num_threads(1)
# A property is true or false; how long an example takes says something of the machine alone.
hypothesis.settings.register_profile("titanplans", deadline=None)
hypothesis.settings.load_profile("titanplans")

LONGEST = (
    "mutants",
    "mutants_bugs",
    "compile_architectures",
    "combinations",
    "compile",
    "float8_parallel",
    "parallelize",
)
"""Files of one to three CPU minutes. Where workers take whole files, these go first, so that none is left at the end."""


def pytest_collection_modifyitems(items):
    first = [f"test_{name}" for name in LONGEST]
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))
