"""torchao: float8."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def gains_by_float8(recipe: str) -> Callable[[nn.Module, str], bool]:
    """Return torchao's filter for a recipe: whether its measurements show that a Linear is faster in float8."""
    from torchao.float8 import _auto_filter_for_recipe

    return _auto_filter_for_recipe(recipe, [])


def is_float8_gathered(weight: Any) -> bool:
    """Whether `weight` is a shard that is cast to float8 when FSDP2 gathers it."""
    return isinstance(weight, DTensor) and hasattr(weight._local_tensor, "_precomputed_scale")


def stored_weight(local: Any) -> torch.Tensor:
    """Return the high-precision tensor in the local tensor of a weight that is gathered in float8."""
    return local._tensor


def set_gather_scale(weight: Any, scale: torch.Tensor) -> None:
    """Set the scale with which a weight is cast when FSDP2 gathers it."""
    weight._local_tensor._precomputed_scale = scale


def float8_data(tensor: Any) -> torch.Tensor:
    """Return the float8 values of torchao's Float8TrainingTensor."""
    return tensor._data


def float8_scale(tensor: Any) -> torch.Tensor:
    """Return the scale of torchao's Float8TrainingTensor."""
    return tensor._scale


def cast_to_float8() -> Any:
    """Return torchao's autograd function that casts a tensor with a given scale."""
    from torchao.float8.float8_training_tensor import _ToFloat8ConstrFunc

    return _ToFloat8ConstrFunc
