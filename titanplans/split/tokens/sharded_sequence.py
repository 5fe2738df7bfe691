"""`ShardedSequence`: a tensor with the shape of a full sequence that holds only this rank's tokens.

The code of a mixer gets a `ShardedSequence` under context parallelism. It asks for `hidden_states.shape`, and calls the
projections of its plan, which take the local tokens (`projections`). Functions that apply to each token by itself and need
no other operand also work on the local tokens: casts, scaling by a number, a view in the same shape. Any other function
needs the tokens of other ranks. They are gathered, once for all functions, if the plan permits it
(`attn_region(may_gather=True)`); otherwise the function raises an error.

    sequence                               gathered to                         gradient of the gathered tensor
    full                                   all ranks' tokens                   partial: summed over the ranks
    partial: output of a rowwise product   zeros, except for local tokens      its local tokens
"""

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from titanplans.errors import PlanError
from titanplans.split.local_tokens import GatherPermission, LocalTokens
from titanplans.torch_private.dispatch import (
    make_wrapper,
    tree_leaves,
    tree_map,
    version,
    without_torch_function,
    written_tensors,
)

CASTS = frozenset("to type_as float double half bfloat16".split())  # noqa: SIM905
SCALES = frozenset("mul __mul__ __rmul__ div true_divide __truediv__".split())  # noqa: SIM905
"""Functions whose arguments are the sequence and numbers."""
COPIES = frozenset("contiguous clone detach".split())  # noqa: SIM905
VIEWS = frozenset("view view_as reshape __getitem__".split())  # noqa: SIM905
"""Functions that may return the sequence unchanged."""
OF_TOKENS = CASTS | SCALES | COPIES | VIEWS | {"dropout"}
"""Functions that may apply to each token by itself."""
LIKE_ANOTHER = frozenset("to type_as view_as reshape_as expand_as".split())  # noqa: SIM905
"""Functions that give their first argument the shape, dtype or device of another."""
EXPORTS = frozenset("tolist numpy __array__".split())  # noqa: SIM905
"""Functions that refuse a subclass of Tensor before they dispatch."""


class _NeedsTokens(Exception):
    """Raised in a probe when a function uses the values of a sequence."""


class _Probe(threading.local):
    is_active = False
    """A function runs to find out whether it uses values, or only shape, dtype or device."""


_probe = _Probe()


class ShardedSequence(torch.Tensor):
    """A tensor with the shape of a full sequence, of which this rank holds only `shard`; made by `sharded_sequence`."""

    shard: torch.Tensor
    tokens: LocalTokens
    permission: GatherPermission
    partial: bool
    """The sequence is a partial sum over the ranks."""
    gathered: dict[bool, torch.Tensor]
    """The gathered full sequence, by whether gradients were enabled; {} until it is gathered."""

    def to_full(self) -> torch.Tensor:
        """Return the full sequence as a plain tensor; it is gathered once."""
        grad_enabled = torch.is_grad_enabled()
        if grad_enabled not in self.gathered:
            self.gathered[grad_enabled] = (
                _PadWithZeros.apply(self.shard, self.tokens)
                if self.partial
                else self.tokens.gather(self.shard)
            )
        return self.gathered[grad_enabled]

    def like(self, shard: torch.Tensor) -> "ShardedSequence":
        """Return a sequence with the local tokens `shard`, and otherwise like this one."""
        return sharded_sequence(shard, self.tokens, self.permission, partial=self.partial)

    @classmethod
    @torch.compiler.disable  # dynamo would ask for the shape of the result, and call this function again
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), _name(func)
        if not args and "input" in kwargs and name in OF_TOKENS:
            args = (kwargs.pop("input"),)
        if name in ("requires_grad_", "register_hook"):
            # All gradients pass through the shard, so flags and hooks are set on it.
            return _call_on_shard(name, *args, **kwargs)
        if name in OF_TOKENS and isinstance(args[0], ShardedSequence):
            if _in_autograd_function(args):
                if name == "view_as" and args[0] is args[1]:
                    return _alias(args[0])  # for an autograd function that returns its input, as FSDP2's do
                return _apply_to_full(func, args, kwargs)
            if (name in VIEWS and _keeps_shape(name, args)) or _is_inactive_dropout(name, args, kwargs):
                return args[0] if torch.is_grad_enabled() else args[0].like(args[0].shard)
            if name not in VIEWS and name != "dropout" and _has_no_other_operand(name, args, kwargs):
                return _apply_to_shard(func, *args, **kwargs)
        if _is_factory(name) or (name in LIKE_ANOTHER and not isinstance(args[0], ShardedSequence)):
            return func(*tree_map(_placeholder, args), **tree_map(_placeholder, kwargs))
        # A function in Python may draw random numbers before it uses values, so it can't be probed by running it.
        in_python = isinstance(func, FunctionType) and func.__module__ != "torch._tensor"
        if name in EXPORTS or in_python:
            return _apply_to_full(func, args, kwargs)
        try:
            # A function that only asks for shape, dtype or device never reaches `__torch_dispatch__`. Probe without a graph,
            # since a checkpoint would count the tensors that a function saves before it gets there.
            with without_torch_function(), torch.no_grad():
                _probe.is_active = True
                return func(*args, **kwargs)
        except _NeedsTokens:
            pass
        finally:
            _probe.is_active = False
        return _apply_to_full(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Apply `func` to full sequences, for code that bypasses `__torch_function__`; autograd has already recorded it."""
        if _probe.is_active:
            raise _NeedsTokens
        kwargs = kwargs or {}
        if _is_factory(func.__name__.partition(".")[0]):
            args, kwargs = tree_map(_placeholder, (args, kwargs))
            return func(*args, **kwargs)
        _check_permissions(str(func), args, kwargs)
        if any(isinstance(x, ShardedSequence) for x in written_tensors(func, args, kwargs)):
            raise PlanError(
                f"{func} changes hidden states in place, but a context-parallel rank holds only its own tokens: "
                "give it a clone"
            )
        with torch.no_grad():
            args, kwargs = tree_map(_full, (args, kwargs))
        return func(*args, **kwargs)


def sharded_sequence(
    shard: torch.Tensor, tokens: LocalTokens, permission: GatherPermission, *, partial: bool = False
) -> ShardedSequence:
    """Return a `ShardedSequence` whose local tokens are `shard`.

    The full shape takes no memory. The sequence is a node of the autograd graph, so that code which bypasses
    `__torch_function__` can pass back a gradient of the full sequence.
    """
    if not torch.is_grad_enabled():
        shard = shard.detach()
    return _set_fields(_FullShape.apply(shard, tokens, partial), shard, tokens, permission, partial)


def _set_fields(
    sequence: Any, shard: torch.Tensor, tokens: LocalTokens, permission: GatherPermission, partial: bool
) -> ShardedSequence:
    sequence.shard, sequence.tokens, sequence.partial = shard, tokens, partial
    sequence.permission, sequence.gathered = permission, {}
    return sequence


def _alias(x: ShardedSequence) -> ShardedSequence:
    """Return a sequence of the same local tokens; their gradient bypasses the autograd function that returns it."""
    return _set_fields(
        make_wrapper(ShardedSequence, x.shape, x.shard), x.shard, x.tokens, x.permission, x.partial
    )


def _name(func: Any) -> str:
    """Return the name of a function, or of the attribute whose getter it is."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def _is_factory(name: str) -> bool:
    """Whether a function makes a new tensor with the shape, dtype and device of its argument."""
    return name.startswith("new_") or name.endswith("_like")


def _full(x: Any) -> Any:
    return x.to_full() if isinstance(x, ShardedSequence) else x


def _placeholder(x: Any) -> Any:
    """Return a tensor with the shape, dtype and device of `x` that takes no memory."""
    return x.shard.new_empty((1,) * x.ndim).expand(x.shape) if isinstance(x, ShardedSequence) else x


def _call_on_shard(name: str, x: ShardedSequence, *args: Any, **kwargs: Any) -> Any:
    result = getattr(x.shard, name)(*args, **kwargs)
    if name != "requires_grad_":
        return result
    with without_torch_function():
        return x.requires_grad_(*args, **kwargs)


def _in_autograd_function(args: Any) -> bool:
    """Whether an autograd function is running, which may save values and write their gradient in place."""
    return not torch.is_grad_enabled() and any(
        isinstance(x, ShardedSequence) and x.requires_grad for x in args
    )


def _is_inactive_dropout(name: str, args: Any, kwargs: Any) -> bool:
    """Whether this is a dropout that is turned off."""
    if name != "dropout":
        return False
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return p == 0 or not (args[2] if len(args) > 2 else kwargs.get("training", True))


def _keeps_shape(name: str, args: Any) -> bool:
    """Whether this is a view of the sequence in the same shape."""
    x, *sizes = args
    if name == "__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        full = (slice(None), slice(0, None))
        return all(index is Ellipsis or (isinstance(index, slice) and index in full) for index in indices)
    if len(sizes) == 1 and not isinstance(sizes[0], int | torch.dtype):
        sizes = sizes[0].shape if isinstance(sizes[0], torch.Tensor) else sizes[0]
    if len(sizes) != x.ndim or not all(isinstance(size, int) for size in sizes):
        return False
    return all(size in (-1, length) for size, length in zip(sizes, x.shape, strict=True))


def _has_no_other_operand(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function uses only the sequence and numbers; a cast may take its dtype from another tensor."""
    others = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, torch.Tensor)]
    return name in CASTS or all(x.ndim == 0 for x in others)


def _apply_to_shard(func: Callable[..., Any], x: ShardedSequence, *args: Any, **kwargs: Any) -> Any:
    """Apply `func` to the local tokens, and return a sequence of the result."""
    shard = func(x.shard, *tree_map(_placeholder, args), **tree_map(_placeholder, kwargs))
    if shard is x.shard and torch.is_grad_enabled():
        return x
    return x.like(shard) if isinstance(shard, torch.Tensor) else shard  # such as NotImplemented


def _check_permissions(name: str, args: Any, kwargs: Any) -> None:
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, ShardedSequence):
            x.permission.check(name)


def _apply_to_full(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Apply `func` to full sequences; a sequence that it changes in place gets the changed local tokens."""
    name = _name(func)
    _check_permissions(name, args, kwargs)
    full = {id(x): (x, x.to_full()) for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedSequence)}
    before = {key: version(gathered) for key, (_, gathered) in full.items()}
    args, kwargs = tree_map(_full, (args, kwargs))
    result = func(*args, **kwargs)
    for key, (x, gathered) in full.items():
        if gathered.shape != x.shape:
            raise PlanError(
                f"{name} changes the shape of hidden states in place, but a context-parallel rank holds only its own "
                "tokens: give it a clone"
            )
        if version(gathered) != before[key]:
            others = (
                y for y in tree_leaves((args, kwargs)) if isinstance(y, torch.Tensor) and y is not gathered
            )
            if x.partial and any(y.is_floating_point() and y.ndim for y in others):
                raise PlanError(
                    f"{name} changes a partial sum in place, but a context-parallel rank keeps only its own tokens: "
                    "write the result to another tensor, x = x + y"
                )
            x.shard, x.gathered = x.tokens.take_local(gathered), {}
            result = x if result is gathered else result
    return result


class _FullShape(torch.autograd.Function):
    """Make a tensor of the full shape that takes no memory; its backward passes the gradient on to the local tokens."""

    @staticmethod
    def forward(ctx: Any, shard, tokens, partial):
        ctx.tokens, ctx.partial = tokens, partial
        return make_wrapper(ShardedSequence, tokens.full_shape(shard), shard)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return (ctx.tokens.take_local(grad) if ctx.partial else ctx.tokens.sum(grad)), None, None


class _PadWithZeros(torch.autograd.Function):
    """Zeros of the full shape, except for the local tokens at their position."""

    @staticmethod
    def forward(ctx: Any, shard, tokens):
        ctx.tokens = tokens
        full, length = shard.new_zeros(tokens.full_shape(shard)), shard.shape[tokens.dim]
        full.narrow(tokens.dim, tokens.rank * length, length).copy_(shard)
        return full

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return ctx.tokens.take_local(grad), None
