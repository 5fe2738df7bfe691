"""`LazyTensor`: a tensor with a shape and a dtype whose values are read when they are needed, one box of indices at a time.

torch's functions on lazy tensors return lazy tensors. The results of stack, cat, narrow, chunk and transpose read only the
boxes of their sources that are needed; the results of any other function read their sources completely. So code that was
written for tensors, such as transformers' conversions of weights, runs without reading values.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from titanplans.errors import ModelError
from titanplans.torch_private.dispatch import tree_leaves, tree_map_only

Box = tuple[tuple[int, int], ...]
"""A range of indices for each dimension: the first index, and the index after the last."""


class LazyTensor:
    """A tensor whose values are read when they are needed.

    Args:
        name: the name of the stored tensor from which the values are read, for errors.
        shape: the tensor's shape.
        dtype: the dtype of its values.
        fetch: returns the values in a box, with the box's shape.
    """

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, fetch: Callable[[Box], torch.Tensor]
    ):
        self.name, self.shape, self.dtype, self._fetch = name, torch.Size(shape), dtype, fetch

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Read the values in `box`; None: all values."""
        return self._fetch(tuple((0, size) for size in self.shape) if box is None else box)

    def narrow(self, dim: int, start: int, length: int) -> "LazyTensor":
        """Return a slice of a dimension, like `torch.Tensor.narrow`."""
        dim = dim % self.ndim
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])

        def fetch(box: Box) -> torch.Tensor:
            first, last = box[dim]
            return self.read((*box[:dim], (start + first, start + last), *box[dim + 1 :]))

        return LazyTensor(self.name, shape, self.dtype, fetch)

    def chunk(self, chunks: int, dim: int = 0) -> tuple["LazyTensor", ...]:
        """Split a dimension into at most `chunks` chunks; only the last may be smaller, like `torch.Tensor.chunk`."""
        size = self.shape[dim]
        step = max(1, -(-size // chunks))
        return tuple(
            self.narrow(dim, start, min(step, size - start)) for start in range(0, max(size, 1), step)
        )

    def transpose(self, dim0: int, dim1: int) -> "LazyTensor":
        """Swap two dimensions, like `torch.Tensor.transpose`."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]

        def fetch(box: Box) -> torch.Tensor:
            return self.read(tuple(box[dim] for dim in order)).transpose(dim0, dim1)

        return LazyTensor(self.name, [self.shape[dim] for dim in order], self.dtype, fetch)

    def contiguous(self) -> "LazyTensor":
        """Return the tensor itself, since the memory layout is decided when it is read."""
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or not callable(method := getattr(torch.Tensor, name, None)):
            raise AttributeError(f"a LazyTensor has no {name}")
        return lambda *args, **kwargs: apply_lazily(method, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Apply a function of torch to lazy tensors."""
        kwargs = kwargs or {}
        if func is torch.stack:
            return _stack(*args, **kwargs)
        if func is torch.cat:
            return _concatenate(*args, **kwargs)
        if func is torch.Tensor.copy_:
            return func(args[0], args[1].read(), **kwargs)
        if getattr(func, "__name__", "") in ("chunk", "narrow", "transpose"):
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return apply_lazily(func, args, kwargs)


def lazy_tensors(
    tensors: Mapping[str, torch.Tensor | LazyTensor], read: Callable[[str], torch.Tensor]
) -> dict[str, LazyTensor]:
    """Return lazy tensors whose values can only be read completely.

    The tensor that was read last is cached, since several of its boxes may be read one after the other.

    Args:
        tensors: tensors with the shapes and dtypes, e.g. on meta.
        read: takes the name of a tensor and returns all its values; on a rank without values, it returns a tensor on meta.
    """
    last: dict[str, torch.Tensor] = {}

    def lazy(name: str, tensor: torch.Tensor | LazyTensor) -> LazyTensor:
        def fetch(box: Box) -> torch.Tensor:
            if name not in last:
                last.clear()
                last[name] = read(name)
            return last[name][slices(box)]

        return LazyTensor(name, tensor.shape, tensor.dtype, fetch)

    return {name: lazy(name, tensor) for name, tensor in tensors.items()}


def _stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    first = tensors[0]
    dim = dim % (first.ndim + 1)
    for other in tensors:
        if other.shape != first.shape:
            raise _mismatch_error(first, other)
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])

    def fetch(box: Box) -> torch.Tensor:
        inner = (*box[:dim], *box[dim + 1 :])
        start, stop = box[dim]
        if start >= stop:
            return _empty(box, first.dtype)
        return torch.stack([tensor.read(inner) for tensor in tensors[start:stop]], dim)

    return LazyTensor(_name_range(tensors), shape, first.dtype, fetch)


def _concatenate(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    first = tensors[0]
    dim = dim % first.ndim
    sizes = [tensor.shape[dim] for tensor in tensors]
    for other in tensors:
        if (*other.shape[:dim], *other.shape[dim + 1 :]) != (*first.shape[:dim], *first.shape[dim + 1 :]):
            raise _mismatch_error(first, other)
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])

    def fetch(box: Box) -> torch.Tensor:
        start, stop = box[dim]
        values, offset = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            low, high = max(start - offset, 0), min(stop - offset, size)
            if low < high:
                values.append(tensor.read((*box[:dim], (low, high), *box[dim + 1 :])))
            offset += size
        if not values:
            return _empty(box, first.dtype)
        return values[0] if len(values) == 1 else torch.cat(values, dim)

    return LazyTensor(_name_range(tensors), shape, first.dtype, fetch)


def apply_lazily(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Apply any function to lazy tensors. Shapes are computed on meta now, and values are computed when they are read.

    Returns:
        A lazy tensor, or a list or tuple of lazy tensors, in place of the tensors that `func` returns; any other result is
        returned unchanged.
    """

    def call_with(to_tensor: Callable[[LazyTensor], torch.Tensor]) -> Any:
        tensor_args, tensor_kwargs = tree_map_only(LazyTensor, to_tensor, (args, kwargs or {}))
        return func(*tensor_args, **tensor_kwargs)

    name = next(value.name for value in tree_leaves((args, kwargs)) if isinstance(value, LazyTensor))
    meta_result = call_with(lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"))

    def lazy_result(pick: Callable[[Any], torch.Tensor]) -> LazyTensor:
        meta = pick(meta_result)
        return LazyTensor(
            name, meta.shape, meta.dtype, lambda box: pick(call_with(LazyTensor.read))[slices(box)]
        )

    if isinstance(meta_result, torch.Tensor):
        return lazy_result(lambda result: result)
    if isinstance(meta_result, list | tuple) and not isinstance(meta_result, torch.Size):
        return type(meta_result)(lazy_result(operator.itemgetter(index)) for index in range(len(meta_result)))
    return meta_result


def _mismatch_error(first: LazyTensor, other: LazyTensor) -> ModelError:
    return ModelError(
        f"{other.name} has the shape {tuple(other.shape)} and {first.name} {tuple(first.shape)}, but they belong to one "
        "tensor of the model: the folder is incomplete or damaged"
    )


def _name_range(tensors: Sequence[LazyTensor]) -> str:
    return tensors[0].name if len(tensors) == 1 else f"{tensors[0].name} ... {tensors[-1].name}"


def slices(box: Box) -> tuple[slice, ...]:
    """Return a box as an index for a tensor."""
    return tuple(slice(first, last) for first, last in box)


def _empty(box: Box, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty([max(last - first, 0) for first, last in box], dtype=dtype)
