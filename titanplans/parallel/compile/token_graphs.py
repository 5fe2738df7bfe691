"""Where the graphs of a compiled block end that sends tokens to other ranks: at its mixers, and at its experts.

A mixer's code is given a `ShardedSequence` (`titanplans.split.tokens`), a subclass of tensor that is not for a graph. What
lies between mixers works on own tokens, and is compiled. How many rows come to experts that ranks share is known on the
host alone.
"""

from functools import cache
from typing import Any

import torch
from torch import nn

from titanplans.split.state import specialise, state_of, subclass
from titanplans.torch_private.compile import break_graphs_in_calls


def sends_tokens(block: nn.Module) -> bool:
    """Whether in `block` tokens are exchanged for heads, or sent to experts."""
    return any(map(_sends, block.modules()))


def end_graphs_where_tokens_leave(block: nn.Module) -> None:
    """Take such modules of `block` out of its graphs, with their hooks; the rest is a graph before and one behind each."""
    for module in block.modules():
        if _sends(module):
            specialise(module, _out_of_graphs(type(module)))
    break_graphs_in_calls()


def _sends(module: nn.Module) -> bool:
    state = state_of(module)
    return state is not None and (state.exchanges or state.experts is not None)


@cache
def _out_of_graphs(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `cls`, under the same name, whose calls stay out of graphs; blocks share it."""

    def sends(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.__call__(self, *args, **kwargs)

    reason = "tokens are exchanged for heads, or sent to experts, in it"
    return subclass(cls, {"__call__": torch.compiler.disable(sends, reason=reason)})
