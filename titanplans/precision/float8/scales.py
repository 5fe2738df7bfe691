"""The scales of all weights, for the recipe tensorwise: sought at once before each forward, instead of one by one.

The scale of a weight is that of its largest number, on whichever rank that is. Each product, or each gather, would
ask all ranks for its own: latency, and nothing else. Here one reduction asks for all of them.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanplans.split.collectives import all_reduce
from titanplans.split.converted import float8_linears
from titanplans.split.state import state_of
from titanplans.torch_private.dtensor import local_tensor
from titanplans.torch_private.torchao import is_float8_gathered, set_gather_scale, stored_weight


def seek_scales_together(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Let each forward of `model`, split or sharded and converted by tensorwise, begin with the scales of its weights.

    Args:
        model: after `fsdp.shard`, so that this comes before FSDP gathers.
        dtype: in which products see the weights (mixed precision); None: as stored.
    """
    scales = model.__dict__["_float8_scales"] = _Scales(model, dtype)
    model.register_forward_pre_hook(lambda module, args: scales.seek(), prepend=True)


def seek_scales(model: nn.Module) -> None:
    """Seek the scales now, before weights are gathered outside of a forward; nothing where each is sought by itself."""
    scales = model.__dict__.get("_float8_scales")
    if scales is not None:
        scales.seek()


class _Scales:
    def __init__(self, model: nn.Module, dtype: torch.dtype | None):
        self.linears = list(float8_linears(model).values())
        self.wrapped = any(is_float8_gathered(linear._parameters["weight"]) for linear in self.linears)
        self.dtype = dtype

    @torch.no_grad()
    def seek(self) -> None:
        # Weights that are still gathered lie on another mesh than sharded ones; wrapped, they have their scale.
        by_mesh: dict[DeviceMesh, list[Any]] = {}
        for linear in self.linears:
            weight = linear._parameters["weight"]
            if is_float8_gathered(weight) if self.wrapped else isinstance(weight, DTensor):
                by_mesh.setdefault(weight.device_mesh, []).append(linear)
        for mesh, linears in by_mesh.items():
            self._seek(mesh, linears)

    def _seek(self, mesh: DeviceMesh, linears: list[Any]) -> None:
        from torchao.float8.float8_utils import amax_to_scale

        weights: list[DTensor] = [linear._parameters["weight"] for linear in linears]
        stored: list[Any] = [local_tensor(weight) for weight in weights]
        if self.wrapped:
            stored = [stored_weight(tensor) for tensor in stored]
        # A rank may hold no row of a small weight.
        each = [t.abs().amax() if t.numel() else t.new_zeros(()) for t in stored]
        largest = torch.stack(each).to(mesh.device_type)
        for dim in range(mesh.ndim):
            if any(weight.placements[dim].is_shard() for weight in weights):
                group = mesh.get_group(dim)
                largest = all_reduce(largest, (group.group_name, group.size()), "max")
        if not self.wrapped and self.dtype is not None:
            largest = largest.to(self.dtype)  # of the cast weight: rounding keeps the order
        scales = amax_to_scale(largest, linears[0].config.cast_config_weight.target_dtype)
        for linear, weight, scale in zip(linears, weights, scales, strict=True):
            if self.wrapped:
                set_gather_scale(weight, scale)
            else:
                if (state := state_of(linear)) is not None:
                    state.weight_scale = scale
