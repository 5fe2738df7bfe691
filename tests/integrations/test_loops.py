"""A split model in loops with Accelerate and Lightning Fabric, compared with the unsplit model in the same loop."""

import functools

import pytest
import torch

from examples import accelerate_loop, fabric_loop
from tests.support import process_groups
from titanplans import Degrees

pytestmark = pytest.mark.thorough

TOLERANCE = 5e-5
"""A relative tolerance. Sums in another order round differently, and AdamW's first steps divide small gradients by their own
size. So losses and norms differ by up to 2e-5 after eight steps in float32."""


def accelerate(rank, ranks, **folders):
    return accelerate_loop.train(Degrees(tp=ranks) if ranks > 1 else None, **folders)


def fabric(rank, ranks, **folders):
    return fabric_loop.train(ranks, **folders)


@pytest.mark.parametrize("loop", [accelerate, fabric])
def test_losses_and_norms_are_those_of_the_unsplit_model_also_after_resuming(loop, tmp_path):
    def run(ranks, **folders):
        return torch.tensor(process_groups.run(functools.partial(loop, ranks=ranks, **folders), ranks))

    folder = str(tmp_path / "step-4")
    unsplit, split = run(1), run(2, save=folder)
    assert split.shape == (8, 2)
    torch.testing.assert_close(split, unsplit, rtol=TOLERANCE, atol=0)
    for ranks in (1, 2, 4):
        torch.testing.assert_close(run(ranks, resume=folder), split[4:], rtol=TOLERANCE, atol=0)
