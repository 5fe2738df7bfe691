"""`ShardedSequence`: a tensor that shows the shape of the whole sequence, and holds this rank's tokens.

The code of a model reads `hidden_states.shape`, and calls its projections: they take the tokens (`products`). A function of
torch that works token by token gives another such tensor, one that asks for a shape gets it, and **every other one reads the
numbers**, which are gathered. So does what does not ask torch's functions: a scripted function, vmap, autograd's formulas.

    kind      read, the numbers are                 the gradient
    outside   gathered from all ranks               is a part on each rank: summed
    whole     gathered from all ranks               is a part on each rank: summed
    partial   zeros, with the tokens at their place is taken at their place

Outside of regions a plain tensor is replicated. In one it may be a partial sum, and own tokens of it would lose the others'.
A `partial` sequence is such a sum: the output of a row-wise projection.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

from titanplans.errors import PlanError
from titanplans.split.own_tokens import OwnTokens
from titanplans.torch_private.dispatch import (
    schema,
    tree_leaves,
    tree_map,
    version,
    without_torch_function,
    wrapper,
)

TOKENWISE = frozenset(
    """
    mul __mul__ __rmul__ add __add__ __radd__ sub __sub__ __rsub__ div true_divide __truediv__ neg pow __pow__ to
    float double bfloat16 half type_as clone contiguous detach sigmoid silu tanh relu gelu softplus exp
    """.split()  # noqa: SIM905
)
"""Functions that give of each token what they are given of it, by name."""
SUMS = frozenset("add __add__ __radd__ sub __sub__ __rsub__".split())  # noqa: SIM905
RESHAPES = frozenset("view reshape expand view_as reshape_as expand_as __getitem__".split())  # noqa: SIM905
"""Functions that may return the sequence as it is."""
ASKS = frozenset(
    """
    shape dtype device ndim requires_grad is_cuda is_cpu is_meta layout is_leaf grad_fn is_sparse is_quantized
    is_nested itemsize nbytes size dim numel ndimension nelement element_size stride is_contiguous is_floating_point
    is_complex get_device __len__ __hash__ new_tensor
    """.split()  # noqa: SIM905
)
"""Fields and functions that read no numbers."""
MAKES = frozenset(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full
    """.split()  # noqa: SIM905
)
"""Functions that make something else of its shape, dtype and device."""
LIKE_IT = frozenset("to type_as view_as reshape_as expand_as".split())  # noqa: SIM905
"""Functions that give their first argument the shape, dtype or device of another."""

Kind = Literal["outside", "whole", "partial"]


class ShardedSequence(torch.Tensor):
    """A whole sequence, whose tokens on this rank are `shard`; made by `sharded_sequence`."""

    shard: torch.Tensor
    tokens: OwnTokens
    kind: Kind
    read: dict[bool, torch.Tensor]
    """The numbers, once they have been asked for, with a gradient or without."""

    @property
    def partial(self) -> bool:
        """This rank's part of a sum."""
        return self.kind == "partial"

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.shape[self.tokens.dim]

    def numbers(self) -> torch.Tensor:
        """Return the whole sequence as a plain tensor, gathered once for all who read it."""
        recorded = torch.is_grad_enabled()
        if recorded not in self.read:
            read = _Placed.apply if self.partial else _gather
            self.read[recorded] = read(self.shard, self.tokens)
        return self.read[recorded]

    def like(self, shard: torch.Tensor, kind: Kind | None = None) -> "ShardedSequence":
        """Return the sequence whose tokens are `shard`."""
        return sharded_sequence(shard, self.tokens, self.kind if kind is None else kind)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), _name(func)
        if not args and "input" in kwargs and name in (*RESHAPES, *LIKE_IT, "dropout"):
            args = (kwargs.pop("input"),)
        if name in ASKS:
            with without_torch_function():
                return func(*args, **kwargs)
        if name in MAKES or (name in LIKE_IT and not isinstance(args[0], ShardedSequence)):
            args, kwargs = tree_map(_shown, (args, kwargs))
            return func(*args, **kwargs)
        if name in ("requires_grad_", "register_hook"):
            # All gradients go through the shard's, so flags and hooks are set on the shard.
            return _on_tokens(name, *args, **kwargs)
        if not _in_function(args):
            if (name in RESHAPES and _keeps_shape(name, args)) or _drops_nothing(name, args, kwargs):
                return args[0] if torch.is_grad_enabled() else args[0].like(args[0].shard)
            if name in TOKENWISE and _fits(name, args, kwargs):
                return _of_tokens(func, args, kwargs)
        return _of_numbers(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute `func` of the numbers, for what has not asked `__torch_function__`; autograd has recorded it."""
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
            args, kwargs = tree_map(_numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def sharded_sequence(shard: torch.Tensor, tokens: OwnTokens, kind: Kind = "whole") -> ShardedSequence:
    """Return the sequence of which `shard` are the tokens of this rank.

    It takes no memory. It is part of the graph, for what reads its numbers without asking: the gradient is of the whole.
    """
    if not torch.is_grad_enabled():
        shard = shard.detach()
    whole: Any = _Look.apply(shard, tokens, kind == "partial")
    whole.shard, whole.tokens, whole.kind, whole.read = shard, tokens, kind, {}
    return whole


def _name(func: Any) -> str:
    """Return the name of a function, or of the field that it gets."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def _gather(shard: torch.Tensor, tokens: OwnTokens) -> torch.Tensor:
    return tokens.gather(shard)


def _numbers(x: Any) -> Any:
    return x.numbers() if isinstance(x, ShardedSequence) else x


def _shown(x: Any) -> Any:
    """Return a tensor of the shape, dtype and device of `x` that takes no memory."""
    return x.shard.new_empty((1,) * x.ndim).expand(x.shape) if isinstance(x, ShardedSequence) else x


def _on_tokens(name: str, x: ShardedSequence, *args: Any, **kwargs: Any) -> Any:
    found = getattr(x.shard, name)(*args, **kwargs)
    if name != "requires_grad_":
        return found
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
    if not isinstance(x, ShardedSequence):
        return False
    if name == "__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        full = (slice(None), slice(0, None))
        return all(one is Ellipsis or (isinstance(one, slice) and one in full) for one in indices)
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = sizes[0].shape if isinstance(sizes[0], torch.Tensor) else sizes[0]
    if isinstance(sizes, torch.dtype) or len(sizes) != x.ndim:
        return False
    return all(size in (-1, own) for size, own in zip(sizes, x.shape, strict=True))


def _token_dim(x: torch.Tensor, whole: ShardedSequence) -> int | None:
    """Return the dimension of `x` that meets the tokens of `whole` where both are broadcast; None if there is none."""
    at = whole.tokens.dim - whole.ndim + x.ndim
    return None if at < 0 or x.shape[at] == 1 else at


def _fits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether each rank may compute a function of its own tokens, which works token by token."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    sequences = [x for x in tensors if isinstance(x, ShardedSequence)]
    first = sequences[0]
    alike = all((x.ndim, x.length) == (first.ndim, first.length) for x in sequences)
    if not alike or kwargs.get("inplace") or kwargs.get("out") is not None or any(x is True for x in args):
        return False
    if name in SUMS and any(x.partial for x in sequences):
        return all(isinstance(x, ShardedSequence) and x.partial for x in tensors)
    if name in LIKE_IT:
        return True
    plain = [x for x in tensors if not isinstance(x, ShardedSequence)]
    with_tokens = [(x, at) for x in plain if (at := _token_dim(x, first)) is not None]
    return all(x.ndim <= first.ndim for x in plain) and all(
        x.shape[at] == first.length and (first.kind == "outside" or not x.is_floating_point())
        for x, at in with_tokens
    )


def _of_tokens(func: Callable[..., Any], args: Any, kwargs: Any) -> ShardedSequence:
    """Return `func` of this rank's tokens, which fit."""
    sequences = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedSequence)]
    first, tokens = sequences[0], sequences[0].tokens

    def own(x: Any) -> Any:
        if isinstance(x, ShardedSequence):
            return x.shard
        if not isinstance(x, torch.Tensor) or _name(func) in LIKE_IT:
            return x
        return x if (at := _token_dim(x, first)) is None else tokens.own(x, dim=at)

    args, kwargs = tree_map(own, (args, kwargs))
    made = func(*args, **kwargs)
    if made is first.shard and torch.is_grad_enabled():
        return first
    if not isinstance(made, torch.Tensor):  # NotImplemented, for one
        return made
    return first.like(made, "partial" if any(x.partial for x in sequences) else None)


def _of_numbers(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return `func` of the numbers; what it has changed in place takes this rank's tokens back."""
    read = {id(x): (x, x.numbers()) for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedSequence)}
    before = {at: version(numbers) for at, (_, numbers) in read.items()}
    args, kwargs = tree_map(_numbers, (args, kwargs))
    found = func(*args, **kwargs)
    for at, (x, numbers) in read.items():
        if numbers.shape != x.shape:
            raise PlanError(
                f"{_name(func)} changes the shape of hidden states in place, and a rank of context parallelism has its "
                "tokens alone: give it a clone"
            )
        if version(numbers) != before[at]:
            others = (
                y for y in tree_leaves((args, kwargs)) if isinstance(y, torch.Tensor) and y is not numbers
            )
            if x.partial and any(y.is_floating_point() and y.ndim for y in others):
                raise PlanError(
                    f"{_name(func)} changes a part of a sum over ranks in place, and a rank of context parallelism keeps "
                    "its own tokens of it: write the result to another tensor, x = x + y"
                )
            x.shard, x.read = x.tokens.own(numbers), {}
            found = x if found is numbers else found
    return found


class _Look(torch.autograd.Function):
    """A tensor of the whole shape that takes no memory, and hands gradients of the whole on to the tokens."""

    @staticmethod
    def forward(ctx: Any, shard, tokens, partial):
        ctx.tokens, ctx.partial = tokens, partial
        shape = list(shard.shape)
        shape[tokens.dim] *= tokens.ranks
        return wrapper(ShardedSequence, shape, shard)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return (ctx.tokens.own(grad) if ctx.partial else ctx.tokens.sum(grad)), None, None


class _Placed(torch.autograd.Function):
    """Zeros, with a rank's tokens at their place."""

    @staticmethod
    def forward(ctx: Any, shard, tokens):
        ctx.tokens = tokens
        shape, number = list(shard.shape), shard.shape[tokens.dim]
        shape[tokens.dim] *= tokens.ranks
        full = shard.new_zeros(shape)
        full.narrow(tokens.dim, tokens.rank * number, number).copy_(shard)
        return full

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return ctx.tokens.own(grad), None
