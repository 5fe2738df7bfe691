"""Compute the float8 scales of all weights by one all-reduce per mesh dimension before each forward (recipe tensorwise).

Without this, each product, or each gather of FSDP2, all-reduces the absolute maximum of one weight, a small
collective that costs its latency.
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


def compute_scales_together(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Compute the scales of all weights of `model` before each forward.

    Args:
        model: converted with the recipe tensorwise, and split or sharded. Call this after `fsdp.shard`.
        dtype: dtype of the weights in products (mixed precision); None: the dtype in which they are stored.
    """
    scales = model.__dict__["_float8_scales"] = _Scales(model, dtype)
    # The hook is prepended so that it runs before FSDP2's hook, which gathers the weights.
    model.register_forward_pre_hook(lambda module, args: scales.compute(), prepend=True)


def compute_scales(model: nn.Module) -> None:
    """Compute the scales now, before weights are gathered outside of a forward.

    Does nothing if `compute_scales_together` was not called.
    """
    scales = model.__dict__.get("_float8_scales")
    if scales is not None:
        scales.compute()


class _Scales:
    def __init__(self, model: nn.Module, dtype: torch.dtype | None):
        self.linears = list(float8_linears(model).values())
        self.is_gathered_in_float8 = any(
            is_float8_gathered(linear._parameters["weight"]) for linear in self.linears
        )
        self.dtype = dtype

    @torch.no_grad()
    def compute(self) -> None:
        # Weights that FSDP2 has not resharded yet are on another mesh than sharded weights. If weights are gathered in
        # float8, weights that are not resharded yet are skipped, since they are already cast.
        by_mesh: dict[DeviceMesh, list[Any]] = {}
        for linear in self.linears:
            weight = linear._parameters["weight"]
            if is_float8_gathered(weight) if self.is_gathered_in_float8 else isinstance(weight, DTensor):
                by_mesh.setdefault(weight.device_mesh, []).append(linear)
        for mesh, linears in by_mesh.items():
            self._compute_on(mesh, linears)

    def _compute_on(self, mesh: DeviceMesh, linears: list[Any]) -> None:
        from torchao.float8.float8_utils import amax_to_scale

        weights: list[DTensor] = [linear._parameters["weight"] for linear in linears]
        stored: list[Any] = [local_tensor(weight) for weight in weights]
        if self.is_gathered_in_float8:
            stored = [stored_weight(tensor) for tensor in stored]
        # A rank's shard of a small weight may be empty.
        maxima = [t.abs().amax() if t.numel() else t.new_zeros(()) for t in stored]
        amax = torch.stack(maxima).to(mesh.device_type)
        for dim in range(mesh.ndim):
            if any(weight.placements[dim].is_shard() for weight in weights):
                group = mesh.get_group(dim)
                amax = all_reduce(amax, (group.group_name, group.size()), "max")
        if not self.is_gathered_in_float8 and self.dtype is not None:
            amax = amax.to(self.dtype)  # the maximum of the cast weight, since rounding is monotonic
        scales = amax_to_scale(amax, linears[0].config.cast_config_weight.target_dtype)
        for linear, weight, scale in zip(linears, weights, scales, strict=True):
            if self.is_gathered_in_float8:
                set_gather_scale(weight, scale)
            else:
                if (state := state_of(linear)) is not None:
                    state.weight_scale = scale
