"""Dispatch of operators: modes, fake tensors, schemas, pytrees."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.fx.experimental._config
from torch import _assert_async as assert_async
from torch import _foreach_mul_ as foreach_mul_
from torch import _foreach_norm as foreach_norm
from torch import _scaled_mm as scaled_mm
from torch._C import _disabled_torch_function_impl as disabled_torch_function
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from titanplans.torch_private.swapped import swapped

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "address_of",
    "assert_async",
    "disabled_torch_function",
    "fake_mode_is_on",
    "foreach_mul_",
    "foreach_norm",
    "has_dispatch_mode",
    "make_wrapper",
    "meta_nonzero_finds_all",
    "named_arguments",
    "scaled_mm",
    "schema",
    "storage_id",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "unset_fake_temporarily",
    "version",
    "watch_resizes",
    "without_torch_function",
    "written_tensors",
]


def schema(operator: Any) -> Any:
    """Return an operator's schema (`name`, `arguments`); None for a higher-order operator, which has none."""
    return getattr(operator, "_schema", None)


def named_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `operator` by name, without those that have their default."""
    arguments = getattr(schema(operator), "arguments", ())
    return dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)


def written_tensors(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call of `operator` changes in place."""
    named = named_arguments(operator, args, kwargs)
    return [
        x
        for argument in getattr(schema(operator), "arguments", ())
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in tree_leaves(named.get(argument.name))
        if isinstance(x, torch.Tensor)
    ]


def fake_mode_is_on() -> bool:
    """Whether a FakeTensorMode is active, so that nothing is computed."""
    return torch._guards.active_fake_mode() is not None


def has_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode is active on this thread, such as a recorder or a FakeTensorMode."""
    return torch._C._len_torch_dispatch_stack() > 0


def meta_nonzero_finds_all() -> AbstractContextManager[Any]:
    """Return a context in which `nonzero` on a meta tensor returns every element instead of raising an error."""
    return torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


def storage_id(tensor: torch.Tensor) -> int:
    """Return the address of the storage object of `tensor`. It identifies the storage even of a meta tensor, which has no
    memory."""
    return address_of(tensor.untyped_storage())


def address_of(storage: torch.UntypedStorage) -> int:
    """Return the address of the storage object itself; it does not change if the storage's memory is freed."""
    return storage._cdata


def fake_device(tensor: FakeTensor) -> torch.device:
    """Return the device of a fake tensor, as `tensor.device` does, but without a call of its mode."""
    return tensor.fake_device


@contextmanager
def watch_resizes(on_resize: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """In the body, call `on_resize` after each `UntypedStorage.resize_`, by which FSDP2 frees and allocates parameters.

    `resize_` of a storage is not an operator, so dispatch modes do not see it.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_report(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        on_resize(storage)
        return result

    with swapped(torch.UntypedStorage, "resize_", resize_and_report):
        yield


def version(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to `tensor`."""
    return tensor._version


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which `__torch_function__` and its modes are disabled."""
    return torch._C.DisableTorchFunction()


def make_wrapper(cls: type[torch.Tensor], shape: Sequence[int], like: torch.Tensor) -> Any:
    """Return a tensor of the wrapper subclass `cls`, without storage, with the dtype and device of `like`."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
