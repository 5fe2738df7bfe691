"""`LooksWhole`: a tensor that shows the shape of the whole sequence, and holds this rank's tokens.

The code of a model reads `hidden_states.shape`, and calls its projections: they take the tokens (`products`). Whatever works
token by token here works on them, and gives another such tensor; whatever else reads the numbers gathers them.

    kind      read, the numbers are                 the gradient
    whole     gathered from all ranks               is a part on each rank: summed
    partial   zeros, with the tokens at their place is taken at their place

A `partial` one is this rank's summand of what all ranks together have: the output of a projection that splits its inputs.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from titanplans.split.tokens.own import OwnTokens
from titanplans.torch_private.dispatch import tree_map, without_torch_function

_TOKENWISE = frozenset(
    """
    mul __mul__ __rmul__ add __add__ __radd__ sub __sub__ __rsub__ div true_divide __truediv__ neg pow __pow__ to
    float double bfloat16 half type_as clone contiguous sigmoid silu tanh relu gelu softplus exp
    """.split()  # noqa: SIM905
)
"""Functions that give of each token what they are given of it, by name."""
_FIELDS = frozenset(
    """
    shape dtype device ndim requires_grad is_cuda is_cpu is_meta layout is_leaf grad_fn is_sparse is_quantized
    is_nested itemsize nbytes
    """.split()  # noqa: SIM905
)
_ASKS = frozenset(
    """
    size dim numel ndimension nelement element_size is_floating_point is_complex get_device
    __len__ zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full
    new_tensor
    """.split()  # noqa: SIM905
)
"""Functions that read no numbers."""


class LooksWhole(torch.Tensor):
    """A whole sequence, whose tokens on this rank are `shard`; made by `look_whole`."""

    shard: torch.Tensor
    tokens: OwnTokens
    partial: bool
    read: dict[bool, torch.Tensor]
    """The numbers, once they have been asked for, with a gradient or without."""
    region: Any = None
    """At the entry of a region, and behind `through`: the call of it, which knows what reads this."""
    through: tuple[Any, ...] = ()
    """The modules that have made this of the region's input, one after the other."""

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.shape[self.tokens.dim]

    def numbers(self) -> torch.Tensor:
        """Return the whole sequence as a plain tensor, gathered once for all who read it."""
        recorded = torch.is_grad_enabled()
        if recorded not in self.read:
            read = _Placed.apply if self.partial else _gather
            self.read[recorded] = read(self.shard, self.tokens, self.length)
        return self.read[recorded]

    def like(self, shard: torch.Tensor, partial: bool | None = None) -> "LooksWhole":
        """Return the sequence whose tokens are `shard`."""
        return look_whole(shard, self.tokens, self.length, self.partial if partial is None else partial)

    def by(self, module: nn.Module, *args: Any, **kwargs: Any) -> "LooksWhole":
        """Return what `module` makes of this, token by token; its readers are exchanged with the region's others."""
        region, reader = self.region, (module, self.through)
        if region is not None and (passed := region.passed.pop(reader, None)) is not None:
            return passed
        made = self.like(nn.Module.__call__(module, self.shard, *args, **kwargs))
        made.region, made.through = region, (*self.through, module)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _ASKS or (name == "__get__" and func.__self__.__name__ in _FIELDS):  # type: ignore[attr-defined]
            with without_torch_function():
                return func(*args, **kwargs)
        tokenwise = name in _TOKENWISE or _drops_nothing(name, args, kwargs) or _keeps_shape(name, args)
        if tokenwise and not _in_function(args):
            found = _of_tokens(func, name, args, kwargs)
            if found is not NotImplemented:
                return found
        if name == "detach":
            return args[0].by(_DETACH)
        if name == "requires_grad_":
            with without_torch_function():
                args[0].shard.requires_grad_(*args[1:], **kwargs)
                return func(*args, **kwargs)
        own = args[0] if args and isinstance(args[0], LooksWhole) else None
        args, kwargs = tree_map(_numbers, (args, kwargs))
        found = func(*args, **kwargs)
        if own is not None and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            own.shard, own.read, own.region = own.tokens.own(args[0]), {}, None  # changed in place
            return own
        return found


class _Detach(nn.Module):
    """A reader of a detached input is exchanged with the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


_DETACH = _Detach()


def look_whole(shard: torch.Tensor, tokens: OwnTokens, length: int, partial: bool = False) -> LooksWhole:
    """Return a sequence of `length` tokens; those of this rank are `shard`.

    Its own numbers are NaN. It is part of the graph, for autograd functions that are given it as it is: they see the numbers
    once they ask for them, and the gradient that they return is taken for that of the whole.
    """
    base: Any = _Look.apply(shard, tokens, length, partial)
    base.__class__ = _kind(type(base))
    base.shard, base.tokens, base.partial, base.read = shard, tokens, partial, {}
    return base


@cache
def _kind(cls: type[torch.Tensor]) -> type[LooksWhole]:
    """Return the class for a base of class `cls`: a plain tensor, or a fake one."""
    return LooksWhole if cls is torch.Tensor else type("LooksWhole", (LooksWhole, cls), {})


def _gather(shard: torch.Tensor, tokens: OwnTokens, length: int) -> torch.Tensor:
    return tokens.gather(shard, length)


def _numbers(x: Any) -> Any:
    return x.numbers() if isinstance(x, LooksWhole) else x


def _in_function(args: Any) -> bool:
    """Whether an autograd function computes: it saves numbers, whose gradient it may write in their place."""
    return not torch.is_grad_enabled() and any(isinstance(x, LooksWhole) and x.requires_grad for x in args)


def _drops_nothing(name: str, args: Any, kwargs: Any) -> bool:
    """Whether this is a dropout that is off."""
    if name != "dropout":
        return False
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return p == 0 or not (args[2] if len(args) > 2 else kwargs.get("training", True))


def _keeps_shape(name: str, args: Any) -> bool:
    """Whether this is a view of the sequence in the shape that it has."""
    if name == "__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        full = (slice(None), slice(0, None))
        return all(one is Ellipsis or (isinstance(one, slice) and one in full) for one in indices)
    if name not in ("view", "reshape", "expand"):
        return False
    x, *sizes = args
    sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(x, LooksWhole) or len(sizes) != x.ndim or isinstance(sizes, torch.dtype):
        return False
    return all(size in (-1, own) for size, own in zip(sizes, x.shape, strict=True))


def _of_tokens(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Return `func` of this rank's tokens; NotImplemented if an argument has no tokens that fit."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, LooksWhole)]
    first = given[0]
    if name in ("view", "reshape", "expand", "__getitem__"):
        return first.like(first.shard)
    fits = True

    def own(x: Any) -> Any:
        nonlocal fits
        if isinstance(x, LooksWhole):
            return x.shard
        if not isinstance(x, torch.Tensor) or name == "type_as":
            return x
        at = first.tokens.dim - first.ndim + x.ndim
        if x.ndim > first.ndim:
            fits = False
        if at < 0 or x.shape[at] == 1:
            return x
        fits = fits and x.shape[at] == first.length
        # Its tokens are in another dimension if it has fewer.
        return first.tokens.own(x, dim=at) if fits else x

    args, kwargs = tree_map(own, (args, kwargs))
    if not fits or any(x.length != first.length for x in given):
        return NotImplemented
    return first.like(func(*args, **kwargs), any(x.partial for x in given))


class _Look(torch.autograd.Function):
    """A tensor of the whole shape that takes no memory, and hands gradients of the whole on to the tokens."""

    @staticmethod
    def forward(ctx: Any, shard, tokens, length, partial):
        ctx.tokens, ctx.partial = tokens, partial
        shape = list(shard.shape)
        shape[tokens.dim] = length
        number = float("nan") if shard.is_floating_point() else 0
        return shard.new_full((1,) * shard.ndim, number).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return (ctx.tokens.own(grad) if ctx.partial else ctx.tokens.sum(grad)), None, None, None


class _Placed(torch.autograd.Function):
    """Zeros, with a rank's tokens at their place."""

    @staticmethod
    def forward(ctx: Any, shard, tokens, length):
        ctx.tokens = tokens
        shape = list(shard.shape)
        shape[tokens.dim] = length
        whole, number = shard.new_zeros(shape), tokens.number(length)
        first = min(tokens.rank * shard.shape[tokens.dim], length)
        whole.narrow(tokens.dim, first, number).copy_(shard.narrow(tokens.dim, 0, number))
        return whole

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return ctx.tokens.own(grad), None, None
