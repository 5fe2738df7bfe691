"""`stream_arguments()`: a block whose forward takes more tensors [batch, sequence, ...] than the hidden states."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.split.arguments import positional
from titanplans.split.border import Border
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.split.state import key_of
from titanplans.styles.base import Site, Style
from titanplans.text import class_name


class StreamArguments(Style):
    """Shard arguments [batch, sequence, ...] of a block as the residual stream is sharded.

        forward   each rank takes its shard: nothing is sent
        backward  all-gather of the arguments' gradients over the ranks that shard the sequence

    For tensors that the model computes from all tokens, before the first block. Gemma 4 gives each block a projection of
    per-layer embeddings, which its code multiplies by the hidden states.

    Args:
        names: the names of the arguments in the block's forward.
    """

    def __init__(self, *names: str):
        self.names = names

    def refusal(self, module: nn.Module, over: Any) -> str | None:
        unknown = [name for name in self.names if name not in positional(module)]
        return (
            f"its forward has no argument {unknown[0]}; it has {', '.join(positional(module))}"
            if unknown
            else None
        )

    def by_weights(self, module: nn.Module, site: Site) -> None:
        if site.border.stream.shards_sequence:
            hook = partial(_shard, site.border, self, positional(module))
            module.register_forward_pre_hook(hook, with_kwargs=True)

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        if call.dim is None:
            return ()
        largest = max(map(math.prod, call.shapes))
        return tuple(ExpectedCollective((), ("all_gather",), largest) for _ in self.names)


def _shard(
    border: Border,
    style: StreamArguments,
    positions: tuple[str, ...],
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    def shard(name: str, x: Any) -> Any:
        if name not in style.names or x is None:
            return x
        if not isinstance(x, torch.Tensor):
            raise PlanError(
                f"its argument {name} is a {class_name(x)}, not a tensor",
                key=key_of(module),
                style=style,
                module=module,
            )
        return border.stream.shard(x)

    named = tuple(shard(name, x) for name, x in zip(positions, args, strict=False))
    return (*named, *args[len(named) :]), {name: shard(name, x) for name, x in kwargs.items()}
