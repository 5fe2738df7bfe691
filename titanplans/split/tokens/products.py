"""Products of a sharded sequence: this rank's tokens times all weights, then exchanged for all tokens of this rank's heads.

Given a real tensor, such as one whose padding the mixer has taken out, a module multiplies it with its shard of the
weights, as tensor parallelism does; its output is then partial, and the region's exit sums it.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.split.border import Border
from titanplans.split.state import key_of, subclass
from titanplans.split.tokens.exchange import HeadExchange, Share, to_heads, to_tokens
from titanplans.split.tokens.sharded_sequence import ShardedSequence, sharded_sequence


class Heads(NamedTuple):
    """How a projection's rows are shared out."""

    border: Border
    share: Share
    """Of the rows that this rank multiplies with."""
    closes: bool = False
    """Its output goes back to the stream."""


def _of_own(module: Any, outputs: int | None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Multiply own tokens with all that this rank holds of `module`: so many `outputs`, which a Conv1D counts as `nf`."""
    state = module._split
    before, state.uses_all_rows = state.uses_all_rows, True
    counted = module.__dict__.get("nf") if outputs is not None else None
    if counted is not None:
        module.nf = outputs
    try:
        return nn.Module.__call__(module, *args, **kwargs)
    finally:
        state.uses_all_rows = before
        if counted is not None:
            module.nf = counted


@cache
def to_heads_after(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a product [..., inputs] -> [..., rows], which returns all tokens of this rank's heads."""

    def call(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(x, ShardedSequence):
            return cls.__call__(self, x, *args, **kwargs)
        heads: Heads = self._split.heads
        own = _of_own(self, heads.share.width, x.shard, *args, **kwargs)
        return to_heads(own, HeadExchange(x.tokens, heads.share))

    return subclass(cls, {"__call__": call}, "tokens_to_heads")


@cache
def to_tokens_before(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a product of this rank's heads' outputs, which works on this rank's tokens of all heads."""

    def call(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        heads: Heads = self._split.heads
        border = heads.border
        if border.stream.runs_in_full:
            return cls.__call__(self, x, *args, **kwargs)
        lead = border.tokens.region_shape[:-1]
        if x.shape[:-1] != lead:
            if heads.closes:
                raise PlanError(
                    f"it got {tuple(x.shape)}, not all tokens {tuple(lead)} of a sequence, which context parallelism would "
                    "have to exchange: leave the sum to the region's exit, rowwise(reduce_output=False) in attn_region()",
                    key=self._split.key,
                    style=self._split.style,
                    module=self,
                )
            return cls.__call__(self, x, *args, **kwargs)
        tokens = border.tokens
        if isinstance(x, ShardedSequence):
            x = x.numbers()
        own = to_tokens(x, HeadExchange(tokens, heads.share))
        output = _of_own(self, None, own, *args, **kwargs)
        return output if heads.closes else sharded_sequence(output, tokens, tokens.permission, partial=True)

    return subclass(cls, {"__call__": call}, "heads_to_tokens")


@cache
def of_each_token(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a token-wise module, which takes this rank's tokens of a sharded sequence."""

    def call(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, ShardedSequence):
            made = x.like(nn.Module.__call__(self, x.shard, *args, **kwargs))
            made.permission = x.permission._replace(source=key_of(self))
            return made
        return cls.__call__(self, x, *args, **kwargs)

    return subclass(cls, {"__call__": call}, "own_tokens")


def is_product(module: nn.Module) -> bool:
    """Whether `module` multiplies each token with a weight: a Linear, or GPT-2's Conv1D."""
    weight = module._parameters.get("weight", module._parameters.get("nf4_codes"))
    return weight is not None and (weight.ndim == 2 or isinstance(module, nn.Linear))
