"""Prefill and generation of a split YOCO, whose prefill may skip the second half of the blocks."""

import pytest
import torch

from tests import zoo
from tests.support.process_groups import run_on_threads
from titanplans import PlanError, apply_plan

TOKENS = torch.arange(8)[None]


def test_a_prefill_that_skips_blocks_is_refused_if_the_stream_is_sharded():
    def work(rank):
        model = zoo.build("yoco")
        apply_plan(model, rank.mesh, loss_parallel=False)
        with pytest.raises(PlanError, match=r"skip_cross_decoder = True selects the last"):
            model(TOKENS, skip_cross_decoder=True)
        return model(TOKENS).logits

    assert run_on_threads(work).shape == (1, 8, 96)


def test_it_generates_the_tokens_of_the_unsplit_model():
    unsplit = zoo.build("yoco").generate(TOKENS, max_new_tokens=3, do_sample=False)

    def work(rank):
        model = zoo.build("yoco")
        apply_plan(model, rank.mesh, sequence_parallel=False)
        return model.generate(TOKENS, max_new_tokens=3, do_sample=False)

    assert torch.equal(run_on_threads(work), unsplit)
