"""What stands at a border of the stream, cut by tokens: the embedding, the end of the stream, regions that mix tokens.

Their code gets a sequence that looks whole; on the stream a rank has its own tokens.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import nn

from titanplans.plan.styles.region import Region
from titanplans.plan.styles.replicated import EndOfStream
from titanplans.plan.styles.vocab import VocabEmbedding
from titanplans.split.state import make_state, specialise, subclass
from titanplans.split.stream import Border
from titanplans.split.tensors.rules import Rule, Site, on_input, on_output
from titanplans.split.tensors.vocab import EMBEDDING
from titanplans.split.tokens.sharded_sequence import ShardedSequence, sharded_sequence


def _install_embedding(style: VocabEmbedding, module: nn.Module, site: Site) -> None:
    EMBEDDING.install(style, module, site)
    specialise(module, _on_own_ids(type(module), style.begins_stream))


@cache
def _on_own_ids(cls: type[nn.Module], begins_stream: bool) -> type[nn.Module]:
    """Subclass an embedding class with a forward that looks up this rank's tokens in a forward of the model."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        border = self._split.border
        tokens = border.tokens
        if not border.stream.is_sharded() or input.ndim <= tokens.dim:
            return cls.forward(self, input)
        length = input.shape[tokens.dim]
        out = cls.forward(self, tokens.own(input))
        if begins_stream:
            border.stream.begun, border.stream.length = True, length
            return out
        return sharded_sequence(out, tokens, length, "outside")

    return subclass(cls, {"forward": forward})


def _install_end(style: EndOfStream, module: nn.Module, site: Site) -> None:
    module.register_forward_pre_hook(partial(_end, site.border))
    module.register_forward_hook(partial(_look, site.border))


def _end(border: Border, module: nn.Module, args: Any) -> Any:
    own = border.shared_tokens(args[0], border.stream.length)
    border.stream.stop()
    return (own, *args[1:])


def _look(border: Border, module: nn.Module, args: Any, output: Any) -> Any:
    def look(x: torch.Tensor) -> torch.Tensor:
        return sharded_sequence(x, border.tokens, border.stream.length, "outside")

    return on_output(look, output)


def _install_region(style: Region, module: nn.Module, site: Site) -> None:
    border, make_state(module).exchanges = site.border, True
    module.register_forward_pre_hook(partial(_enter, style, border), with_kwargs=True)
    if style.reduce_output:
        module.register_forward_hook(partial(_leave, border))


def _enter(style: Region, border: Border, module: nn.Module, args: Any, kwargs: Any) -> Any:
    def enter(x: torch.Tensor) -> ShardedSequence:
        whole = sharded_sequence(border.enter(x), border.tokens, border.length_of(x))
        border.tokens.region_shape = whole.shape
        return whole

    return on_input(enter, style, style.input_name, module, args, {**kwargs, **style.arguments})


def _leave(border: Border, module: nn.Module, args: Any, output: Any) -> Any:
    def leave(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, ShardedSequence):
            return border.leave(x.shard)
        lead = border.tokens.region_shape[:-1]
        return border.leave(border.tokens.sum(x.unflatten(0, lead) if len(lead) > 1 and x.ndim == 2 else x))

    return on_output(leave, output)


REGION, END_OF_STREAM, EMBEDDING_OF_OWN = Rule(_install_region), Rule(_install_end), Rule(_install_embedding)
