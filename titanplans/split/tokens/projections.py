"""Projections under context parallelism. Start at `to_heads_after`.

A projection of a `ShardedSequence` multiplies this rank's tokens by all rows of the weight that its TP rank stores; an
all-to-all then exchanges tokens for heads. A plain tensor, such as one from which the mixer has removed the padding, is
multiplied by this rank's slice of the weight, as under tensor parallelism. The output is then partial, and the region's exit
sums it.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.split.border import Border
from titanplans.split.state import key_of, subclass
from titanplans.split.tokens.exchange import HeadExchange, RowAssignment, to_heads, to_tokens
from titanplans.split.tokens.sharded_sequence import ShardedSequence, sharded_sequence


class HeadSplit(NamedTuple):
    """How a projection's rows are split over the context-parallel ranks."""

    border: Border
    assignment: RowAssignment
    """Which context-parallel rank uses which of the rows that this TP rank stores."""
    closes: bool = False
    """The projection's output leaves the region."""


def _multiply_all_rows(module: Any, outputs: int | None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Multiply local tokens by all rows of `module` that this rank stores.

    `outputs` is the number of these rows if they are outputs of the module; None: they are its inputs."""
    state = module._split
    before, state.uses_all_rows = state.uses_all_rows, True
    # A Conv1D reshapes its output by `nf`, which the plan has set to the count of this rank's rows in the mixer.
    nf = module.__dict__.get("nf") if outputs is not None else None
    if nf is not None:
        module.nf = outputs
    try:
        return nn.Module.__call__(module, *args, **kwargs)
    finally:
        state.uses_all_rows = before
        if nf is not None:
            module.nf = nf


@cache
def to_heads_after(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a projection [..., inputs] -> [..., rows] so that it returns all tokens of this rank's heads."""

    def call(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(x, ShardedSequence):
            return cls.__call__(self, x, *args, **kwargs)
        heads: HeadSplit = self._split.heads
        local = _multiply_all_rows(self, heads.assignment.width, x.shard, *args, **kwargs)
        return to_heads(local, HeadExchange(x.tokens, heads.assignment))

    return subclass(cls, {"__call__": call}, "tokens_to_heads")


@cache
def to_tokens_before(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a projection of this rank's heads so that it multiplies local tokens of all heads."""

    def call(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        heads: HeadSplit = self._split.heads
        border = heads.border
        if border.stream.runs_in_full:
            return cls.__call__(self, x, *args, **kwargs)
        lead = border.tokens.region_shape[:-1]
        if x.shape[:-1] != lead:
            if heads.closes:
                raise PlanError(
                    f"its input has the shape {tuple(x.shape)}, but context parallelism can exchange only an input "
                    f"with all tokens {tuple(lead)} of a sequence: sum the output at the region's exit, with "
                    "rowwise(reduce_output=False) in attn_region()",
                    key=self._split.key,
                    style=self._split.style,
                    module=self,
                )
            return cls.__call__(self, x, *args, **kwargs)
        tokens = border.tokens
        if isinstance(x, ShardedSequence):
            x = x.to_full()
        local = to_tokens(x, HeadExchange(tokens, heads.assignment))
        output = _multiply_all_rows(self, None, local, *args, **kwargs)
        return output if heads.closes else sharded_sequence(output, tokens, tokens.permission, partial=True)

    return subclass(cls, {"__call__": call}, "heads_to_tokens")


@cache
def on_local_tokens(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a token-wise module so that it applies to the local tokens of a sharded sequence."""

    def call(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, ShardedSequence):
            output = x.like(nn.Module.__call__(self, x.shard, *args, **kwargs))
            output.permission = x.permission._replace(source=key_of(self))
            return output
        return cls.__call__(self, x, *args, **kwargs)

    return subclass(cls, {"__call__": call}, "local_tokens")


def is_product(module: nn.Module) -> bool:
    """Whether `module` multiplies each token by a weight: a Linear, or GPT-2's Conv1D."""
    weight = module._parameters.get("weight", module._parameters.get("nf4_codes"))
    return weight is not None and (weight.ndim == 2 or isinstance(module, nn.Linear))
