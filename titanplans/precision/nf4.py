"""Frozen weights of Linear modules in NF4 (QLoRA, arXiv:2305.14314), as two parameters of ordinary kinds.

    nf4_codes   [outputs, inputs / 2]      uint8       two codes a byte, the first in the upper four bits
    nf4_scales  [outputs, inputs / 64]     bfloat16    the largest number of each block of 64 inputs

That is 4.25 bits a weight. Each parameter is split, sharded, gathered and saved as any other: a row is a row of the weight,
and a column stands for 2 or 64 inputs. So a part of them is the quantised part of the weight, and a split model multiplies
by the same numbers as the whole one, as long as no block is cut (`nf4_faults`). The weight is cast for its product alone.

Codes and blocks are those of torchao and bitsandbytes. The scales are not quantised again, and they are rounded before the
codes are sought, so that no cast to bfloat16 changes a weight.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from titanplans.plan.resolve import ResolvedPlan
from titanplans.split.parameters.shards import copy_shard, local_shard
from titanplans.split.state import specialise, subclass

BLOCK = 64
"""Weights that share a scale, in a row."""
CODES, SCALES = "nf4_codes", "nf4_scales"
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)
"""The sixteen numbers of NF4: appendix E of the paper."""


def is_quantised(module: nn.Module) -> bool:
    """Whether the weight of `module` is in NF4."""
    return CODES in module._parameters


def quantised(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` whose weight is in NF4, by name."""
    return {name: module for name, module in model.named_modules() if is_quantised(module)}


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of `weight` [outputs, inputs], of whose inputs a block divides the number."""
    blocks = weight.detach().float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).bfloat16()
    levels = torch.tensor(LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    divisor = scales.float().where(scales != 0, 1.0)
    nearest = torch.bucketize(blocks / divisor.unsqueeze(-1), between).to(torch.uint8).flatten(-2)
    return nearest[..., ::2] << 4 | nearest[..., 1::2], scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [outputs, inputs] that codes and scales stand for, rounded to `dtype` once."""
    wide = torch.promote_types(scales.dtype, torch.float32)
    levels = torch.tensor(LEVELS, device=codes.device, dtype=wide)
    both = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], -1)  # of each byte
    pairs = nn.functional.embedding(codes.int(), both)
    return (
        (pairs.flatten(-2).unflatten(-1, (-1, BLOCK)) * scales.to(wide).unsqueeze(-1)).flatten(-2).to(dtype)
    )


def keep_quantised(module: nn.Linear) -> None:
    """Keep the weight of `module`, a plain Linear that is not split, in NF4 from now on; in place, on meta or not."""
    weight = module._parameters.pop("weight")
    assert weight is not None
    outputs, inputs = weight.shape
    if weight.is_meta:
        codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(outputs, inputs // BLOCK, dtype=torch.bfloat16, device="meta")
    else:
        codes, scales = quantise(weight)
    own = {CODES: nn.Parameter(codes, requires_grad=False), SCALES: nn.Parameter(scales, requires_grad=False)}
    module._parameters = own | module._parameters  # first, as the weight was
    specialise(module, _multiplying(type(module)))


def write(module: nn.Module, weight: torch.Tensor, name: str) -> None:
    """Quantise a `weight`, and write this rank's parts of codes and scales into those of `module`, called `name`.

    Args:
        module: whose weight is in NF4, split in any way or not at all.
        weight: whole; of one that is read part by part, this rank's part is read alone, where codes and scales are split
            alike.
        name: for errors.
    """
    codes: Any = module._parameters[CODES]
    scales: Any = module._parameters[SCALES]
    alike = (
        isinstance(codes, DTensor) and isinstance(scales, DTensor) and codes.placements == scales.placements
    )
    if alike:
        weight = local_shard(weight, codes.device_mesh, codes.placements, name=f"{name}.weight")
    values = quantise(torch.empty(weight.shape, device=codes.device).copy_(weight))
    for own, param, value in zip((CODES, SCALES), (codes, scales), values, strict=True):
        if alike:
            param.to_local().copy_(value)  # type: ignore[attr-defined]
        else:
            copy_shard(param, value, name=f"{name}.{own}")


def nf4_faults(plan: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Yield each plan key whose parts of a weight in NF4 would cut blocks, and why."""
    for entry in plan.entries:
        codes = entry.layouts.get(CODES)
        if codes is None or codes.rows is not None or codes.placement != Shard(1):
            continue
        outputs, halves = entry.module._parameters[CODES].shape  # type: ignore[union-attr]
        inputs = 2 * halves
        if inputs // BLOCK % plan.degree:
            yield (
                entry.key,
                f"its weight [{outputs}, {inputs}] is in NF4, and a rank would hold [{outputs}, "
                f"{inputs / plan.degree:g}], and blocks of {BLOCK} inputs share a scale: take a degree that divides "
                f"{inputs // BLOCK}, or leave the module out by lora.exclude_modules",
            )


@cache
def _multiplying(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a Linear with a weight that is cast for each product."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        output = _NF4Product.apply(input, self.nf4_codes, self.nf4_scales)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def weight(self: Any) -> torch.Tensor:
        scales = self.nf4_scales
        return dequantise(self.nf4_codes, scales, scales.dtype)

    return subclass(cls, {"forward": forward, "weight": property(weight)}, "nf4")


class _NF4Product(torch.autograd.Function):
    """x W^T. The backward casts the weight again: a copy kept from the forward would take the memory that NF4 saves."""

    @staticmethod
    def forward(ctx: Any, x, codes, scales):
        ctx.save_for_backward(codes, scales)
        return nn.functional.linear(x, dequantise(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        codes, scales = ctx.saved_tensors
        return grad @ dequantise(codes, scales, grad.dtype), None, None
