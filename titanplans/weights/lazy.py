"""Tensors whose values are read when they are needed, and no more of them than is needed.

A `LazyTensor` has a shape, a dtype and a way to read any box of itself. PyTorch's functions on it give further lazy
tensors: what stacks, concatenates, cuts or transposes reads of its sources the boxes that it is asked for; any other
function reads its sources whole once it is read. So code that was written for tensors, such as transformers' conversions
of published weights, says of each part of its result where it comes from.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from titanplans.errors import ModelError
from titanplans.torch_private.dispatch import tree_leaves, tree_map_only

Box = tuple[tuple[int, int], ...]
"""First index and the one behind the last, of each dimension."""


class LazyTensor:
    """A tensor that is read part by part.

    Args:
        name: where it comes from, for errors.
        shape: of the whole.
        dtype: of its values.
        fetch: returns the part in a box, whose shape is the box's.
    """

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, fetch: Callable[[Box], torch.Tensor]
    ):
        self.name, self.shape, self.dtype, self._fetch = name, torch.Size(shape), dtype, fetch

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Return the values in `box`, all of them if it is None."""
        return self._fetch(tuple((0, size) for size in self.shape) if box is None else box)

    def narrow(self, dim: int, start: int, length: int) -> "LazyTensor":
        """As torch's."""
        dim = dim % self.ndim
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])

        def fetch(box: Box) -> torch.Tensor:
            first, last = box[dim]
            return self.read((*box[:dim], (start + first, start + last), *box[dim + 1 :]))

        return LazyTensor(self.name, shape, self.dtype, fetch)

    def chunk(self, chunks: int, dim: int = 0) -> tuple["LazyTensor", ...]:
        """As torch's: chunks are of equal size but for the last, and there may be fewer."""
        size = self.shape[dim]
        step = max(1, -(-size // chunks))
        return tuple(
            self.narrow(dim, start, min(step, size - start)) for start in range(0, max(size, 1), step)
        )

    def transpose(self, dim0: int, dim1: int) -> "LazyTensor":
        """As torch's."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]

        def fetch(box: Box) -> torch.Tensor:
            return self.read(tuple(box[dim] for dim in order)).transpose(dim0, dim1)

        return LazyTensor(self.name, [self.shape[dim] for dim in order], self.dtype, fetch)

    def contiguous(self) -> "LazyTensor":
        """Itself: the memory layout is decided by the read."""
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or not callable(method := getattr(torch.Tensor, name, None)):
            raise AttributeError(f"a LazyTensor has no {name}")
        return lambda *args, **kwargs: computed(method, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """PyTorch's function on lazy tensors."""
        kwargs = kwargs or {}
        if func is torch.stack:
            return _stacked(*args, **kwargs)
        if func is torch.cat:
            return _concatenated(*args, **kwargs)
        if func is torch.Tensor.copy_:
            return func(args[0], args[1].read(), **kwargs)
        if getattr(func, "__name__", "") in ("chunk", "narrow", "transpose"):
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return computed(func, args, kwargs)


def lazily(
    tensors: Mapping[str, torch.Tensor | LazyTensor], read: Callable[[str], torch.Tensor]
) -> dict[str, LazyTensor]:
    """Return tensors that `read(name)` gives whole; the last one is kept, so that its parts may be read one by one.

    Args:
        tensors: shapes and dtypes; may lie on meta.
        read: returns the values, or on a rank that does not write a tensor on meta.
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


def _stacked(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    first = tensors[0]
    dim = dim % (first.ndim + 1)
    for other in tensors:
        if other.shape != first.shape:
            raise _dont_fit(first, other)
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])

    def fetch(box: Box) -> torch.Tensor:
        inner = (*box[:dim], *box[dim + 1 :])
        start, stop = box[dim]
        if start >= stop:
            return _empty(box, first.dtype)
        return torch.stack([tensor.read(inner) for tensor in tensors[start:stop]], dim)

    return LazyTensor(_names(tensors), shape, first.dtype, fetch)


def _concatenated(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    first = tensors[0]
    dim = dim % first.ndim
    sizes = [tensor.shape[dim] for tensor in tensors]
    for other in tensors:
        if (*other.shape[:dim], *other.shape[dim + 1 :]) != (*first.shape[:dim], *first.shape[dim + 1 :]):
            raise _dont_fit(first, other)
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])

    def fetch(box: Box) -> torch.Tensor:
        start, stop = box[dim]
        parts, before = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            low, high = max(start - before, 0), min(stop - before, size)
            if low < high:
                parts.append(tensor.read((*box[:dim], (low, high), *box[dim + 1 :])))
            before += size
        if not parts:
            return _empty(box, first.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    return LazyTensor(_names(tensors), shape, first.dtype, fetch)


def computed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return what any function makes of lazy tensors: shapes are known from meta tensors, values are computed when read."""

    def with_tensors(make: Callable[[LazyTensor], torch.Tensor]) -> Any:
        own_args, own_kwargs = tree_map_only(LazyTensor, make, (args, kwargs or {}))
        return func(*own_args, **own_kwargs)

    name = next(value.name for value in tree_leaves((args, kwargs)) if isinstance(value, LazyTensor))
    shapes = with_tensors(lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"))

    def result(pick: Callable[[Any], torch.Tensor]) -> LazyTensor:
        meta = pick(shapes)
        return LazyTensor(
            name, meta.shape, meta.dtype, lambda box: pick(with_tensors(LazyTensor.read))[slices(box)]
        )

    if isinstance(shapes, torch.Tensor):
        return result(lambda outcome: outcome)
    if isinstance(shapes, list | tuple) and not isinstance(shapes, torch.Size):
        return type(shapes)(result(operator.itemgetter(index)) for index in range(len(shapes)))
    return shapes


def _dont_fit(first: LazyTensor, other: LazyTensor) -> ModelError:
    return ModelError(
        f"{other.name} has the shape {tuple(other.shape)} and {first.name} {tuple(first.shape)}, and they are parts of one "
        "tensor of the model: the folder is incomplete or damaged"
    )


def _names(tensors: Sequence[LazyTensor]) -> str:
    return tensors[0].name if len(tensors) == 1 else f"{tensors[0].name} ... {tensors[-1].name}"


def slices(box: Box) -> tuple[slice, ...]:
    """Return `box` as an index."""
    return tuple(slice(first, last) for first, last in box)


def _empty(box: Box, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty([max(last - first, 0) for first, last in box], dtype=dtype)
