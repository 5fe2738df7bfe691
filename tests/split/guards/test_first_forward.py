"""Checks in the first forward of a split model: batches that differ, parameters added later, random numbers."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support.process_groups import run_on_threads
from tests.support.tiny_model import Tiny, TinyPlan, split
from titanplans import Degrees, PlanError, check_plan

TOKENS = torch.arange(16)[None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda rank: ((TOKENS + (rank == 2),), {}), r"different input_ids on .* rank 2 than"),
        (
            lambda rank: ((), {"input_ids": TOKENS[:, : 16 - (rank == 1)]}),
            r"different input_ids on .* rank 1 than",
        ),
        (lambda rank: ((TOKENS,), {"use_cache": rank == 3}), r"different use_cache on .* rank 3"),
    ],
    ids=["values", "shape", "flag"],
)
def test_ranks_with_different_batches_are_refused(arguments, message):
    def work(world):
        model = split(world)
        args, kwargs = arguments(world.mesh.get_local_rank())
        model(*args, **kwargs)

    with pytest.raises(PlanError, match=message):
        run_on_threads(work, 4)


def test_the_hooks_are_removed_after_the_first_forward_in_training():
    def work(world):
        model = split(world)
        hooks = [len(table) for table in (model._forward_pre_hooks, model._forward_hooks)]
        with torch.no_grad():
            model.eval()(TOKENS)
        twin = copy.deepcopy(model)
        model.train()(TOKENS)
        twin.train()(TOKENS)
        hooks_left = [len(table) for table in (model._forward_pre_hooks, model._forward_hooks)]
        assert hooks_left == [len(table) for table in (twin._forward_pre_hooks, twin._forward_hooks)]
        return [before - after for before, after in zip(hooks, hooks_left, strict=True)]

    assert min(run_on_threads(work)) >= 1


def test_a_split_model_keeps_no_full_parameter():
    def work(world):
        model = Tiny()
        references = [weakref.ref(parameter) for parameter in model.parameters()]
        split(world, model)
        gc.collect()
        return [reference() for reference in references if reference() is not None]

    assert run_on_threads(work) == []


class Adapted(nn.Module):
    """A projection with a low-rank adapter, as in peft."""

    def __init__(self, base):
        super().__init__()
        self.base, self.lora_A, self.lora_B = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


def test_an_adapter_added_after_the_split_is_refused():
    def work(world):
        model = split(world)
        model.layers[1].attn.q_norm = Adapted(model.layers[1].attn.q_norm)
        model(TOKENS)

    with pytest.raises(PlanError, match=r"'layers.1.attn.q_norm.lora_A.weight' was added after"):
        run_on_threads(work)


def test_an_adapter_added_before_the_split_is_refused():
    model = Tiny()
    model.layers[1].mlp.down_proj = Adapted(model.layers[1].mlp.down_proj)
    with pytest.raises(PlanError, match=r"lora_A.* belongs to an adapter"):
        check_plan(model, Degrees(tp=2), plan=TinyPlan)


class WithDropout(Tiny):
    def __init__(self, functional):
        super().__init__()
        self.layers[1].mlp.act_drop = nn.Identity() if functional else nn.Dropout(0.25)
        self.functional = functional

    def forward(self, input_ids):
        if self.functional:
            input_ids = torch.where(torch.rand(input_ids.shape) < 0.5, input_ids, 0)
        return super().forward(input_ids)


def test_dropout_is_refused_for_training_before_anything_moves():
    with pytest.raises(PlanError, match=r"^layers.1.mlp.act_drop.p = 0.25: "):
        check_plan(WithDropout(False), Degrees(tp=2), plan=TinyPlan)
    check_plan(WithDropout(False).eval(), Degrees(tp=2), plan=TinyPlan)
    check_plan(WithDropout(False), Degrees(tp=1), plan=TinyPlan)


def test_random_numbers_in_a_forward_in_training_are_refused():
    def work(world):
        model = split(world, WithDropout(True))
        model.eval()
        with torch.no_grad():
            torch.manual_seed(0)
            model(TOKENS)
        model.train()
        torch.manual_seed(0)
        model(TOKENS)

    with pytest.raises(PlanError, match=r"WithDropout drew random numbers \(its own code"):
        run_on_threads(work, 1)
