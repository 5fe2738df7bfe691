"""The scales of all weights, for the recipe tensorwise: sought at once before each forward, instead of one by one.

The scale of a weight is that of its largest number, on whichever rank that is. Each product, or each gather, would
ask all ranks for its own: latency, and nothing else. Here one reduction asks for all of them.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plans.collectives import all_reduce
from plans.float8 import float8_linears


def seek_scales_together(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Let each forward of `model`, split or sharded and converted by tensorwise, begin with the scales of its weights.

    Args:
        model: after `fsdp.shard`, so that this comes before FSDP gathers.
        dtype: in which products see the weights (mixed precision); None: as stored.
    """
    model.register_forward_pre_hook(_Scales(model, dtype), prepend=True)


class _Scales:
    def __init__(self, model: nn.Module, dtype: torch.dtype | None):
        self.linears = [
            module
            for module in float8_linears(model).values()
            if isinstance(module._parameters["weight"], DTensor)
        ]
        self.dtype = dtype

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: Any) -> None:
        from torchao.float8.float8_utils import amax_to_scale

        weights: list[DTensor] = [linear._parameters["weight"] for linear in self.linears]
        stored: list[Any] = [weight._local_tensor for weight in weights]
        wrapped = hasattr(stored[0], "_precomputed_scale")  # which FSDP2 gathers in float8
        if wrapped:
            stored = [tensor._tensor for tensor in stored]
        # A rank may hold no row of a small weight.
        each = [t.abs().amax() if t.numel() else t.new_zeros(()) for t in stored]
        mesh = weights[0].device_mesh
        largest = torch.stack(each).to(mesh.device_type)
        for dim in range(mesh.ndim):
            if any(weight.placements[dim].is_shard() for weight in weights):
                group = mesh.get_group(dim)
                largest = all_reduce(largest, (group.group_name, group.size()), "max")
        if not wrapped and self.dtype is not None:
            largest = largest.to(self.dtype)  # of the cast weight: rounding keeps the order
        scales = amax_to_scale(largest, self.linears[0].config.cast_config_weight.target_dtype)
        for linear, weight, scale in zip(self.linears, weights, scales, strict=True):
            if wrapped:
                weight._local_tensor._precomputed_scale = scale  # pyrefly: ignore[missing-attribute]
            else:
                linear._weight_scale = scale
