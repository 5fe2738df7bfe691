"""The words of the plan language under FSDP2, recomputed and compiled, over real process groups."""

import functools
from typing import Any, NamedTuple

import equal
import language
import torch
import torch.distributed as dist
from torch import nn

from titanplans.parallel import FSDP2Config, parallelize


class Kind(NamedTuple):
    mixer: type[nn.Module] | None
    mlp: type[nn.Module] | None
    plan: Any


KINDS = {
    "packed": Kind(language.Packed, None, language.PackedPlan),
    "state space": Kind(language.StateSpace, None, language.StateSpacePlan),
    "experts": Kind(None, language.Experts, language.ExpertsPlan),
    "selective": Kind(language.Selective, None, language.SelectivePlan),
    "whole": Kind(None, None, language.WholePlan),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = language.Tiny()
    for layer in model.layers:
        layer.attn = KINDS[kind].mixer() if KINDS[kind].mixer else layer.attn
        layer.mlp = KINDS[kind].mlp() if KINDS[kind].mlp else layer.mlp
    return model


def split(model: nn.Module, kind: str, tp: int, **options: Any) -> equal.Parallel:
    from torchtitan.distributed import ParallelDims

    precision = {"mixed_precision_param": "float32", "mixed_precision_reduce": "float32"}
    config = FSDP2Config(plan=KINDS[kind].plan, disable_loss_parallel=True, **precision, **options)
    dims = ParallelDims(1, -1, 1, tp, 1, 1, dist.get_world_size(), "partial_dtensor")
    parallelize(model, parallel_dims=dims, config=config)
    batch = dims.get_optional_mesh("batch")
    return equal.Parallel(model, batch and batch.get_group())


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


def test_a_step_is_that_of_one_process():
    cases = {
        name: equal.Case(
            functools.partial(build, name[0]), functools.partial(split, kind=name[0], tp=name[1], **options)
        )
        for name, options in CASES.items()
    }
    assert not equal.equals_one_process(cases, ranks=4)
