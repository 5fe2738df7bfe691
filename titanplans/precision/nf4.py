"""Frozen weights of Linear modules in NF4 (QLoRA, arXiv:2305.14314): 4.25 bits per weight, in two ordinary parameters.

    nf4_codes   [outputs, inputs / 2]      uint8       two codes per byte, the first in the upper four bits
    nf4_scales  [outputs, inputs / 64]     bfloat16    the absolute maximum of each block of 64 inputs

Codes and scales are sharded, gathered and saved like other parameters: each of their rows belongs to one row of the weight,
each column to 2 (codes) or 64 (scales) inputs. A shard of codes and scales is the quantised shard of the weight, so a split
model has the weights of the unsplit model, provided that no block is divided between ranks (`nf4_faults`). Code values and
block size are the same as in torchao and bitsandbytes, but the scales are not quantised a second time.
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
"""Number of consecutive weights of a row that share a scale."""
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
"""The sixteen values of NF4: appendix E of the paper."""


def is_quantised(module: nn.Module) -> bool:
    """Whether the weight of `module` is in NF4."""
    return CODES in module._parameters


def quantised(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` whose weight is in NF4, by name."""
    return {name: module for name, module in model.named_modules() if is_quantised(module)}


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of `weight` [outputs, inputs]; `inputs` is a multiple of `BLOCK`."""
    blocks = weight.detach().float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).bfloat16()
    levels = torch.tensor(LEVELS, device=weight.device)
    midpoints = (levels[1:] + levels[:-1]) / 2
    # Divide by the rounded scales, so that each code is the nearest one for the scale that is stored.
    divisor = scales.float().where(scales != 0, 1.0)
    codes = torch.bucketize(blocks / divisor.unsqueeze(-1), midpoints).to(torch.uint8).flatten(-2)
    return codes[..., ::2] << 4 | codes[..., 1::2], scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [outputs, inputs], computed in float32 at least and rounded once to `dtype`."""
    wide = torch.promote_types(scales.dtype, torch.float32)
    levels = torch.tensor(LEVELS, device=codes.device, dtype=wide)
    pair_of_byte = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], -1)  # [256, 2]
    pairs = nn.functional.embedding(codes.int(), pair_of_byte)
    return (
        (pairs.flatten(-2).unflatten(-1, (-1, BLOCK)) * scales.to(wide).unsqueeze(-1)).flatten(-2).to(dtype)
    )


def keep_quantised(module: nn.Linear) -> None:
    """Replace the weight of `module`, an unsplit Linear, by NF4 codes and scales, in place. It may be on meta."""
    weight = module._parameters.pop("weight")
    assert weight is not None
    outputs, inputs = weight.shape
    if weight.is_meta:
        codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(outputs, inputs // BLOCK, dtype=torch.bfloat16, device="meta")
    else:
        codes, scales = quantise(weight)
    nf4 = {CODES: nn.Parameter(codes, requires_grad=False), SCALES: nn.Parameter(scales, requires_grad=False)}
    module._parameters = nf4 | module._parameters  # before the bias, where the weight was
    specialise(module, _nf4_class(type(module)))


def write(module: nn.Module, weight: torch.Tensor, name: str) -> None:
    """Quantise the full `weight` and write this rank's shards of its codes and scales into `module`, in place.

    Args:
        module: a Linear in NF4, split or not.
        weight: the full tensor. If it is loaded lazily, a rank reads only its shard, provided that codes and scales have
            the same placements.
        name: the module's name, for errors.
    """
    codes: Any = module._parameters[CODES]
    scales: Any = module._parameters[SCALES]
    is_sharded_alike = (
        isinstance(codes, DTensor) and isinstance(scales, DTensor) and codes.placements == scales.placements
    )
    if is_sharded_alike:
        weight = local_shard(weight, codes.device_mesh, codes.placements, name=f"{name}.weight")
    values = quantise(torch.empty(weight.shape, device=codes.device).copy_(weight))
    for param_name, param, value in zip((CODES, SCALES), (codes, scales), values, strict=True):
        if is_sharded_alike:
            param.to_local().copy_(value)  # type: ignore[attr-defined]
        else:
            copy_shard(param, value, name=f"{name}.{param_name}")


def nf4_faults(plan: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Yield each plan key that would divide a block of an NF4 weight between ranks, and an explanation."""
    for entry in plan.entries:
        codes = entry.layouts.get(CODES)
        if codes is None or codes.rows is not None or codes.placement != Shard(1):
            continue
        outputs, bytes_per_row = entry.module._parameters[CODES].shape  # type: ignore[union-attr]
        inputs = 2 * bytes_per_row
        if inputs // BLOCK % plan.degree:
            yield (
                entry.key,
                f"its weight [{outputs}, {inputs}] is in NF4, where blocks of {BLOCK} inputs share a scale, but a "
                f"rank would hold [{outputs}, {inputs / plan.degree:g}]: use a degree that divides {inputs // BLOCK}, "
                "or exclude the module with lora.exclude_modules",
            )


@cache
def _nf4_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a Linear class that dequantises its weight for each product."""

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
    """x W^T. The backward dequantises W again, because saving it in the forward would take the memory that NF4 saves."""

    @staticmethod
    def forward(ctx: Any, x, codes, scales):
        ctx.save_for_backward(codes, scales)
        return nn.functional.linear(x, dequantise(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        codes, scales = ctx.saved_tensors
        return grad @ dequantise(codes, scales, grad.dtype), None, None
