"""Where the graphs of a compiled block end that is cut by tokens: at its mixers.

A mixer's code is given a sequence that looks whole (`titanplans.split.tokens.looks_whole`), a subclass of tensor whose class
is set at run time, and learns in its first call which projections read it. Neither is for a graph. What lies between mixers
works on own tokens, and is compiled.
"""

from functools import cache
from typing import Any

import torch
from torch import nn

from titanplans.split.state import specialise, state_of, subclass
from titanplans.torch_private.compile import break_graphs_in_calls


def mixes_tokens(block: nn.Module) -> bool:
    """Whether in `block` tokens are exchanged for heads."""
    return any(map(_is_mixer, block.modules()))


def end_graphs_at_mixers(block: nn.Module) -> None:
    """Take the mixers of `block` out of its graphs, with their hooks; the rest is a graph before and one behind each."""
    for module in block.modules():
        if _is_mixer(module):
            specialise(module, _out_of_graphs(type(module)))
    break_graphs_in_calls()


def _is_mixer(module: nn.Module) -> bool:
    return (state := state_of(module)) is not None and state.readers is not None


@cache
def _out_of_graphs(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `cls`, under the same name, whose calls stay out of graphs; blocks share it."""

    def exchanges_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.__call__(self, *args, **kwargs)

    reason = "tokens are exchanged for heads in a mixer"
    return subclass(cls, {"__call__": torch.compiler.disable(exchanges_tokens, reason=reason)})
