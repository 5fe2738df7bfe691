"""The styles of the plan language with FSDP2, recomputation and compile, over real process groups."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.support import plan_examples, step_comparison

pytestmark = pytest.mark.thorough


class Kind(NamedTuple):
    mixer: type[nn.Module] | None
    mlp: type[nn.Module] | None
    plan: Any


KINDS = {
    "packed": Kind(plan_examples.Packed, None, plan_examples.PackedPlan),
    "state space": Kind(plan_examples.StateSpace, None, plan_examples.StateSpacePlan),
    "experts": Kind(None, plan_examples.Experts, plan_examples.ExpertsPlan),
    "selective": Kind(plan_examples.Selective, None, plan_examples.SelectivePlan),
    "whole": Kind(None, None, plan_examples.ReplicatedMixerPlan),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = plan_examples.Tiny()
    for layer in model.layers:
        layer.attn = KINDS[kind].mixer() if KINDS[kind].mixer else layer.attn
        layer.mlp = KINDS[kind].mlp() if KINDS[kind].mlp else layer.mlp
    return model


CASES = {
    ("packed", 2): {},
    ("packed", 4): {},
    ("packed", 2, "recomputed"): {"activation_checkpoint": {"mode": "full"}},
    ("packed", 2, "compiled"): {"compile": {"enable": True, "backend": "aot_eager"}},
    ("state space", 2): {},
    ("state space", 2, "always"): {"fsdp_reshard_after_forward": "always"},
    ("experts", 2): {},
    ("experts", 2, "recomputed"): {"activation_checkpoint": {"mode": "full"}},
    ("selective", 2): {"enable_sequence_parallel": False},
    ("whole", 2): {},
}


def test_a_step_equals_that_of_one_process():
    cases = {name: options | {"plan": KINDS[name[0]].plan} for name, options in CASES.items()}
    assert not step_comparison.equals_one_process(
        step_comparison.cases_of(cases, build, step_comparison.by_torchtitan), ranks=4
    )
