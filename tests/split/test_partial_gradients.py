"""Partial gradients are summed in one all-reduce for each dtype; with FSDP2, in one for each FSDP module and dtype."""

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests import zoo
from tests.support.kernel_launches import step
from tests.support.process_groups import run_on_threads
from titanplans import apply_plan
from titanplans.observe.recorder import record_collectives
from titanplans.parallel import Degrees, FSDP2Config, Mesh, parallelize
from titanplans.parallel.fsdp import gradient_sync
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.split import partial_gradients
from titanplans.split.decoder import find_decoder
from titanplans.split.gradients import align_gradients
from titanplans.split.partial_gradients import sum_partial

MODELS = ("qwen3", "gla", "gated_deltanet", "mixtral", "gemma3_text", "falcon")


def test_sums_are_those_of_each_gradient_by_itself(monkeypatch):
    monkeypatch.setattr(partial_gradients, "LARGE", 400)

    def work(rank):
        torch.manual_seed(dist_rank := rank.mesh.get_local_rank())

        def gradient(shape, placement=None, dtype=torch.float32):
            local = torch.randn(shape, dtype=dtype)
            return DTensor.from_local(local, rank.mesh, [placement or Partial()], run_check=False)

        transposed = DTensor.from_local(torch.randn(3, 4).t(), rank.mesh, [Partial()], run_check=False)
        grads = [
            gradient((3, 4)),
            gradient((8,), dtype=torch.bfloat16),
            gradient((5,), Shard(0)),
            torch.randn(2),
            gradient(()),
            gradient((10, 10)),  # large, so not bucketed with others
            gradient((7,), Replicate()),
            gradient((0, 3)),
            transposed,
            gradient((6,), Partial("max")),
            gradient((2, 2), dtype=torch.bfloat16),
        ]
        alone = [
            g.redistribute(placements=[Replicate()])
            if isinstance(g, DTensor) and g.placements[0].is_partial("sum")
            else g
            for g in grads
        ]
        sums = sum_partial(grads)
        for ours, theirs in zip(sums, alone, strict=True):
            assert type(ours) is type(theirs)
            if isinstance(ours, DTensor):
                assert (ours.placements, ours.shape, ours.dtype) == (
                    theirs.placements,
                    theirs.shape,
                    theirs.dtype,
                )
                ours, theirs = ours.to_local(), theirs.to_local()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert grads[0].placements == (Partial(),)  # untouched
        return dist_rank

    assert run_on_threads(work, 3) == 0


def all_reduces(record, tp, phase):
    """Return the count of all-reduces of gradients over the ranks `tp`, by module."""
    collectives = (
        c for c in record.collectives if c.operation == "all_reduce" and c.group == tp and c.phase == phase
    )
    return Counter(c.module for c in collectives)


@pytest.mark.parametrize("name", MODELS)
def test_fsdp_sums_the_gradients_of_a_module_when_its_backward_ends(name):
    with fake_ranks(8):
        mesh = Mesh(Degrees(tp=2, dp_replicate=2), "cpu")
        model, inputs = zoo.build(name, dtype=torch.float32, options=False), zoo.inputs(name)
        config = FSDP2Config(mixed_precision_param="bfloat16", mixed_precision_reduce="float32")
        parallelize(model, parallel_dims=mesh, config=config)
        step(model, inputs)
        tp = tuple(mesh.get_mesh("tp").mesh.tolist())
        with record_collectives(model) as record:
            step(model, inputs)
        blocks = find_decoder(model).names
        once = all_reduces(record, tp, "backward")
        assert {block: once[block] for block in blocks} == dict.fromkeys(blocks, 1)
        assert set(once.values()) == {1}

        # Deferred micro batches: one sum for all of them.
        counts = []
        for last in (False, False, True):
            with gradient_sync.accumulate(model, last=last), record_collectives(model) as record:
                step(model, inputs)
            counts.append(all_reduces(record, tp, "backward"))
        assert counts == [Counter(), Counter(), once]


@pytest.mark.parametrize("name", MODELS)
def test_without_fsdp_all_gradients_are_summed_together_once_a_step(name):
    with fake_ranks(2) as mesh:
        model, inputs = zoo.build(name, dtype=torch.float32), zoo.inputs(name)
        apply_plan(model, mesh)
        with record_collectives(model) as record:
            for _ in range(2):
                step(model, inputs)
            assert any(p.grad.placements == (Partial(),) for p in model.parameters())
            align_gradients(model.parameters())
            align_gradients(model.parameters())
        assert all_reduces(record, (0, 1), "update").total() == 1
        assert not any(p.grad.placements[0].is_partial() for p in model.parameters())
