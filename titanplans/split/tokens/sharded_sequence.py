"""`ShardedSequence`: a tensor of the shape of a full sequence, which holds this rank's tokens.

Under context parallelism the code of a mixer gets one. It asks for `hidden_states.shape` and calls the projections of its
plan, which take this rank's tokens (`products`). The sequence also does what is true of each token by itself and needs no
other operand: casts, scaling by a number, a view in the shape that it has. Any other function needs the tokens of the other
ranks. They are gathered, once for all functions that need them, where the plan permits it (`attn_region(gathers=True)`);
elsewhere it is an error.

    sequence   what is gathered                             its gradient
    full       the ranks' tokens                            is partial: summed over the ranks
    partial    nothing: zeros, and this rank's tokens       this rank's tokens of it

A `partial` sequence is to be summed over the ranks: the output of a row-wise projection.
"""

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from titanplans.errors import PlanError
from titanplans.split.own_tokens import GatherPermission, LocalTokens
from titanplans.torch_private.dispatch import (
    schema,
    tree_leaves,
    tree_map,
    version,
    without_torch_function,
    wrapper,
)

CASTS = frozenset("to type_as float double half bfloat16".split())  # noqa: SIM905
SCALES = frozenset("mul __mul__ __rmul__ div true_divide __truediv__".split())  # noqa: SIM905
"""Functions of the sequence and numbers."""
COPIES = frozenset("contiguous clone detach".split())  # noqa: SIM905
VIEWS = frozenset("view view_as reshape __getitem__".split())  # noqa: SIM905
"""Functions that may return the sequence as it is."""
OF_TOKENS = CASTS | SCALES | COPIES | VIEWS | {"dropout"}
"""Functions that may be true of each token by itself."""
LIKE_ANOTHER = frozenset("to type_as view_as reshape_as expand_as".split())  # noqa: SIM905
"""Functions that give their first argument the shape, dtype or device of another."""
EXPORTS = frozenset("tolist numpy __array__".split())  # noqa: SIM905
"""Functions that refuse a subclass of Tensor before they dispatch."""


class _NeedsTokens(Exception):
    """A function has asked for the numbers of a sequence."""


class _Questions(threading.local):
    asked = False
    """A function runs of which nobody knows yet whether it needs numbers."""


_questions = _Questions()


class ShardedSequence(torch.Tensor):
    """A full sequence, whose tokens on this rank are `shard`; made by `sharded_sequence`."""

    shard: torch.Tensor
    tokens: LocalTokens
    permission: GatherPermission
    partial: bool
    """To be summed over the ranks."""
    gathered: dict[bool, torch.Tensor]
    """The full sequence, once it has been gathered, with a gradient or without."""

    def numbers(self) -> torch.Tensor:
        """Return the full sequence as a plain tensor, gathered once."""
        recorded = torch.is_grad_enabled()
        if recorded not in self.gathered:
            gathered = (
                _Placed.apply(self.shard, self.tokens) if self.partial else self.tokens.gather(self.shard)
            )
            self.gathered[recorded] = gathered
        return self.gathered[recorded]

    def like(self, shard: torch.Tensor) -> "ShardedSequence":
        """Return the sequence whose tokens are `shard`."""
        return sharded_sequence(shard, self.tokens, self.permission, partial=self.partial)

    @classmethod
    @torch.compiler.disable  # dynamo would ask for the shape of what it is about to compile, and come here again
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), _name(func)
        if not args and "input" in kwargs and name in OF_TOKENS:
            args = (kwargs.pop("input"),)
        if name in ("requires_grad_", "register_hook"):
            # All gradients go through the shard's, so flags and hooks are set on the shard.
            return _on_tokens(name, *args, **kwargs)
        if name in OF_TOKENS and isinstance(args[0], ShardedSequence):
            if _in_function(args):
                if name == "view_as" and args[0] is args[1]:
                    return _as_it_is(args[0])  # by a function that hands it on, as FSDP2's
                return _of_numbers(func, args, kwargs)
            if (name in VIEWS and _keeps_shape(name, args)) or _drops_nothing(name, args, kwargs):
                return args[0] if torch.is_grad_enabled() else args[0].like(args[0].shard)
            if name not in VIEWS and name != "dropout" and _has_no_other_operand(name, args, kwargs):
                return _of_tokens(func, *args, **kwargs)
        if _makes(name) or (name in LIKE_ANOTHER and not isinstance(args[0], ShardedSequence)):
            return func(*tree_map(_shown, args), **tree_map(_shown, kwargs))
        # A function in Python may draw random numbers before it asks for any of these.
        in_python = isinstance(func, FunctionType) and func.__module__ != "torch._tensor"
        if name in EXPORTS or in_python:
            return _of_numbers(func, args, kwargs)
        try:
            # A question about shape, dtype or device never comes to `__torch_dispatch__`. Without a graph, since a
            # checkpoint would count what a function saves before it comes there.
            with without_torch_function(), torch.no_grad():
                _questions.asked = True
                return func(*args, **kwargs)
        except _NeedsTokens:
            pass
        finally:
            _questions.asked = False
        return _of_numbers(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute `func` of the numbers, for what has not asked `__torch_function__`; autograd has recorded it."""
        if _questions.asked:
            raise _NeedsTokens
        kwargs = kwargs or {}
        if _makes(func.__name__.partition(".")[0]):
            args, kwargs = tree_map(_shown, (args, kwargs))
            return func(*args, **kwargs)
        _check_permissions(str(func), args, kwargs)
        for argument, value in zip(schema(func).arguments, args, strict=False):
            if (
                isinstance(value, ShardedSequence)
                and argument.alias_info is not None
                and argument.alias_info.is_write
            ):
                raise PlanError(
                    f"{func} changes hidden states in place, and a rank of context parallelism has its tokens alone, "
                    "and does not say so to torch's functions: give it a clone"
                )
        with torch.no_grad():
            args, kwargs = tree_map(_numbers, (args, kwargs))
        return func(*args, **kwargs)


def sharded_sequence(
    shard: torch.Tensor, tokens: LocalTokens, permission: GatherPermission, *, partial: bool = False
) -> ShardedSequence:
    """Return the sequence of which `shard` are the tokens of this rank.

    It takes no memory. It is part of the graph, for what needs its numbers without asking: the gradient is of the full
    sequence.
    """
    if not torch.is_grad_enabled():
        shard = shard.detach()
    return _filled(_Look.apply(shard, tokens, partial), shard, tokens, permission, partial)


def _filled(
    sequence: Any, shard: torch.Tensor, tokens: LocalTokens, permission: GatherPermission, partial: bool
) -> ShardedSequence:
    sequence.shard, sequence.tokens, sequence.partial = shard, tokens, partial
    sequence.permission, sequence.gathered = permission, {}
    return sequence


def _as_it_is(x: ShardedSequence) -> ShardedSequence:
    """Return a sequence of the same tokens, through which their gradient goes past the function that hands it on."""
    return _filled(wrapper(ShardedSequence, x.shape, x.shard), x.shard, x.tokens, x.permission, x.partial)


def _name(func: Any) -> str:
    """Return the name of a function, or of the field that it gets."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def _makes(name: str) -> bool:
    """Whether a function makes something else of the shape, dtype and device of a tensor."""
    return name.startswith("new_") or name.endswith("_like")


def _numbers(x: Any) -> Any:
    return x.numbers() if isinstance(x, ShardedSequence) else x


def _shown(x: Any) -> Any:
    """Return a tensor of the shape, dtype and device of `x` that takes no memory."""
    return x.shard.new_empty((1,) * x.ndim).expand(x.shape) if isinstance(x, ShardedSequence) else x


def _on_tokens(name: str, x: ShardedSequence, *args: Any, **kwargs: Any) -> Any:
    result = getattr(x.shard, name)(*args, **kwargs)
    if name != "requires_grad_":
        return result
    with without_torch_function():
        return x.requires_grad_(*args, **kwargs)


def _in_function(args: Any) -> bool:
    """Whether an autograd function computes: it saves numbers, whose gradient it may write in their place."""
    return not torch.is_grad_enabled() and any(
        isinstance(x, ShardedSequence) and x.requires_grad for x in args
    )


def _drops_nothing(name: str, args: Any, kwargs: Any) -> bool:
    """Whether this is a dropout that is off."""
    if name != "dropout":
        return False
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return p == 0 or not (args[2] if len(args) > 2 else kwargs.get("training", True))


def _keeps_shape(name: str, args: Any) -> bool:
    """Whether this is a view of the sequence in the shape that it has."""
    x, *sizes = args
    if name == "__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        full = (slice(None), slice(0, None))
        return all(one is Ellipsis or (isinstance(one, slice) and one in full) for one in indices)
    if len(sizes) == 1 and not isinstance(sizes[0], int | torch.dtype):
        sizes = sizes[0].shape if isinstance(sizes[0], torch.Tensor) else sizes[0]
    if len(sizes) != x.ndim or not all(isinstance(size, int) for size in sizes):
        return False
    return all(size in (-1, own) for size, own in zip(sizes, x.shape, strict=True))


def _has_no_other_operand(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function works on the sequence and numbers alone; a cast may be to the type of another tensor."""
    others = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, torch.Tensor)]
    return name in CASTS or all(x.ndim == 0 for x in others)


def _of_tokens(func: Callable[..., Any], x: ShardedSequence, *args: Any, **kwargs: Any) -> Any:
    """Return the sequence of `func` of this rank's tokens."""
    shard = func(x.shard, *tree_map(_shown, args), **tree_map(_shown, kwargs))
    if shard is x.shard and torch.is_grad_enabled():
        return x
    return x.like(shard) if isinstance(shard, torch.Tensor) else shard  # NotImplemented, for one


def _check_permissions(name: str, args: Any, kwargs: Any) -> None:
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, ShardedSequence):
            x.permission.check(name)


def _of_numbers(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return `func` of the full sequences; one that it has changed in place takes this rank's tokens back."""
    name = _name(func)
    _check_permissions(name, args, kwargs)
    full = {id(x): (x, x.numbers()) for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedSequence)}
    before = {at: version(numbers) for at, (_, numbers) in full.items()}
    args, kwargs = tree_map(_numbers, (args, kwargs))
    result = func(*args, **kwargs)
    for at, (x, numbers) in full.items():
        if numbers.shape != x.shape:
            raise PlanError(
                f"{name} changes the shape of hidden states in place, and a rank of context parallelism has its "
                "tokens alone: give it a clone"
            )
        if version(numbers) != before[at]:
            others = (
                y for y in tree_leaves((args, kwargs)) if isinstance(y, torch.Tensor) and y is not numbers
            )
            if x.partial and any(y.is_floating_point() and y.ndim for y in others):
                raise PlanError(
                    f"{name} changes a partial sum in place, and a rank of context parallelism keeps "
                    "its own tokens of it: write the result to another tensor, x = x + y"
                )
            x.shard, x.gathered = x.tokens.take_local(numbers), {}
            result = x if result is numbers else result
    return result


class _Look(torch.autograd.Function):
    """A tensor of the full shape that takes no memory, and hands gradients of the full sequence on to the tokens."""

    @staticmethod
    def forward(ctx: Any, shard, tokens, partial):
        ctx.tokens, ctx.partial = tokens, partial
        return wrapper(ShardedSequence, tokens.full_shape(shard), shard)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return (ctx.tokens.take_local(grad) if ctx.partial else ctx.tokens.sum(grad)), None, None


class _Placed(torch.autograd.Function):
    """Zeros, with a rank's tokens at their position."""

    @staticmethod
    def forward(ctx: Any, shard, tokens):
        ctx.tokens = tokens
        full, number = shard.new_zeros(tokens.full_shape(shard)), shard.shape[tokens.dim]
        full.narrow(tokens.dim, tokens.rank * number, number).copy_(shard)
        return full

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return ctx.tokens.take_local(grad), None
