"""Merge adapters into their base weights, tensor by tensor, for saving a model without adapters."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.adapters.low_rank import adapted
from titanplans.errors import ModelError
from titanplans.precision.nf4 import CODES, SCALES, dequantise, is_quantised
from titanplans.split.adapted import FACTORS, is_transposed
from titanplans.split.decoder import without_wrappers
from titanplans.weights.gather import gather_from_stages, gather_full_tensor, refuse_meta, state_tensors
from titanplans.weights.lazy import LazyTensor, apply_lazily, lazy_tensors


def full_tensors(
    models: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> dict[str, LazyTensor]:
    """Return the full tensors of a split or unsplit model, with its adapters merged into the weights.

    Reading a tensor is collective. The result is on rank 0's CPU, and on meta on the other ranks.

    Args:
        models: the model, or the pipeline stages of this rank.
        group: the process group of the pipeline ranks, whose stages have no adapters; None without a pipeline.

    Raises:
        ModelError: a weight with an adapter is tied to another weight, or a tensor is on meta.
    """
    if group is not None:
        return gather_from_stages(models, group)
    tensors = refuse_meta(state_tensors(models[0])[0])
    return merged(
        lazy_tensors(tensors, lambda name: gather_full_tensor(tensors[name])), named_adapted(models[0])
    )


def merged(tensors: Mapping[str, LazyTensor], adapters: Mapping[str, nn.Module]) -> dict[str, LazyTensor]:
    """Return `tensors` with adapters merged: W + scaling * lora_B lora_A instead of W, lora_A and lora_B.

    Args:
        tensors: the tensors by parameter name.
        adapters: the modules with adapters, by name.

    Raises:
        ModelError: a factor of an adapter, or the weight of its module, is not among `tensors`.
    """
    remaining = dict(tensors)
    for module_name, adapter in adapters.items():
        base = (CODES, SCALES) if is_quantised(adapter) else ("weight",)
        names = [f"{module_name}.{name}" for name in (*base, *FACTORS)]
        if missing := [name for name in names if name not in remaining]:
            raise ModelError(
                f"{module_name} has an adapter, which can't be merged, because {missing[0]} is missing: the weight is tied "
                "to another weight, or the checkpoint holds only adapters"
            )
        weight = apply_lazily(partial(_merge, adapter), [remaining.pop(name) for name in names])
        remaining[f"{module_name}.weight"] = weight
    return remaining


def _merge(adapter: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """Return the merged weight in the dtype of the weight, or of lora_A if the weight is in NF4.

    The sum is computed in float32, or in float64 for a float64 weight.
    """
    *base, a, b = tensors
    dtype = a.dtype if is_quantised(adapter) else base[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    weight = dequantise(base[0], base[1], wide) if is_quantised(adapter) else base[0].to(wide)
    update = b.to(wide) @ a.to(wide) * adapter._low_rank.scaling
    return (weight + (update.t() if is_transposed(adapter) else update)).to(dtype)


def named_adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` that have an adapter, by their names in the state dict."""
    return {without_wrappers(name): module for name, module in adapted(model).items()}
