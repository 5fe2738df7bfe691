"""How torch dispatches an operator: modes, fake tensors, schemas, trees of arguments."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx.experimental._config
from torch import _assert_async as assert_async
from torch import _foreach_mul_ as foreach_mul_
from torch import _foreach_norm as foreach_norm
from torch._C import _disabled_torch_function_impl as disabled_torch_function
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "FakeTensor",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "assert_async",
    "disabled_torch_function",
    "dispatch_is_watched",
    "fake_mode_is_on",
    "foreach_mul_",
    "foreach_norm",
    "rows_for_meta",
    "schema",
    "storage_id",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version",
    "without_torch_function",
    "wrapper",
]


def schema(operator: Any) -> Any:
    """Return an operator's schema (`name`, `arguments`); None for a higher-order operator, which has none."""
    return getattr(operator, "_schema", None)


def fake_mode_is_on() -> bool:
    """Whether a FakeTensorMode is entered, under which nothing is computed."""
    return torch._guards.active_fake_mode() is not None


def dispatch_is_watched() -> bool:
    """Whether a mode sees every operation of this thread: a recorder, fake tensors."""
    return torch._C._len_torch_dispatch_stack() > 0


def rows_for_meta() -> AbstractContextManager[Any]:
    """Return the context in which `nonzero` on meta finds every element, instead of an error."""
    return torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


def storage_id(tensor: torch.Tensor) -> int:
    """Return the address of the storage object of `tensor`: tensors on meta have no memory whose address would tell."""
    return tensor.untyped_storage()._cdata


def version(tensor: torch.Tensor) -> int:
    """Return how often `tensor` has been changed in place."""
    return tensor._version


def without_torch_function() -> AbstractContextManager[Any]:
    """Return the context in which `__torch_function__` and its modes are off."""
    return torch._C.DisableTorchFunction()


def wrapper(cls: type[torch.Tensor], shape: Sequence[int], like: torch.Tensor) -> Any:
    """Return a tensor of a subclass without memory of its own, of the dtype and device of `like`."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
