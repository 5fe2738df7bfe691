"""`vocab_embedding()`: each rank embeds the token ids in its shard of the vocabulary."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from titanplans.split.collectives import sum_ranks
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.split.layout import Layout, shard_size
from titanplans.split.local_tokens import GatherPermission
from titanplans.split.module_weight import with_locals_in_forward
from titanplans.split.state import make_state, specialise, subclass
from titanplans.split.tokens.sharded_sequence import sharded_sequence
from titanplans.styles.base import Site, SplitOver, Style, direct_parameters
from titanplans.torch_private.dispatch import assert_async


class VocabEmbedding(Style):
    """Shard an embedding's rows [vocabulary, hidden]; each rank embeds the ids in its shard, and the outputs are summed.

        forward   x_BLD, zero for ids of other ranks: all-reduce; if it begins the stream, reduce-scatter over L
        backward  nothing; if it begins the stream, all-gather over L; dW is sharded as W

    Args:
        begins_stream: shard the sum as the stream is sharded, which with sequence parallelism halves the bytes sent. For
            models whose code derives nothing (positions, masks, the positions of images) from the embeddings. If False,
            every rank has all embeddings, and the stream begins at the first block.
        all_tokens: under context parallelism every rank embeds all tokens, for models whose code uses the embeddings before
            the first block, to add positions or to insert images. If False, each rank embeds its local tokens.
    """

    takes_token_ids = True

    def __init__(self, *, begins_stream: bool = False, all_tokens: bool = False):
        self.begins_stream, self.all_tokens = begins_stream, all_tokens

    def layouts(self, module: nn.Module, over: SplitOver) -> Mapping[str, Layout]:
        return {"weight": Layout(Shard(0), Shard(0))}

    def refusal(self, module: nn.Module, over: SplitOver) -> str | None:
        if self.begins_stream and self.all_tokens:
            return "begins_stream = True keeps a shard of the embeddings, all_tokens = True keeps all: choose one"
        if getattr(module, "max_norm", None) is not None:
            return f"max_norm = {module.max_norm} renormalises rows in place, which a shard can't: set it to None"
        if getattr(module, "scale_grad_by_freq", False):
            return "scale_grad_by_freq = True counts ids, and a rank sees only those in its shard: set it to False"
        if getattr(module, "sparse", False):
            return "sparse = True makes sparse gradients, which a sharded weight can't have: set it to False"
        return None

    def by_weights(self, module: nn.Module, site: Site) -> None:
        make_state(module).border = site.border
        specialise(
            module,
            with_locals_in_forward(_with_vocabulary_shard(type(module), self.begins_stream), ("weight",)),
        )

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """Install a forward that embeds only the local tokens, unless the model's code needs all embeddings."""
        self.by_weights(module, site)
        if not self.all_tokens:
            specialise(module, _with_local_tokens(type(module), self.begins_stream))

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        elements = call.shapes[0].numel() * direct_parameters(module)["weight"].shape[1]
        if call.dim is None:
            return (ExpectedCollective(("all_reduce",), (), elements),)
        backward = ("all_gather",) if self.begins_stream else ()
        return (ExpectedCollective(("reduce_scatter", "all_reduce"), backward, elements),)


@cache
def _with_vocabulary_shard(cls: type[nn.Module], begins_stream: bool) -> type[nn.Module]:
    """Subclass an embedding class with a forward that embeds the ids in this rank's shard, and sums over the ranks.

    The new forward calls the class's own forward on local tensors, so subclasses that do more than look up (a scaled
    embedding) work unchanged, and `padding_idx` keeps its meaning.
    """

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        border = self._split.border
        if border.mesh is None:
            return cls.forward(self, input)
        rows = self._parameters["weight"].shape[0]
        size = shard_size(rows, border.group[1])
        # One clamp and one comparison are one kernel fewer than two comparisons.
        assert_async(input.clamp(0, rows - 1).eq(input).all(), "a token id outside of the vocabulary")
        local_ids = input - border.rank * size
        is_elsewhere = local_ids.clamp(0, size - 1).ne(local_ids)
        padding = self.padding_idx
        # padding_idx is a row of the full table, so `cls.forward` must not see it; its gradient is stopped below.
        self.padding_idx = None
        try:
            out = cls.forward(self, local_ids.masked_fill(is_elsewhere, 0))
        finally:
            self.padding_idx = padding
        out = out.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        if padding is not None:
            out = torch.where(torch.eq(input, padding).unsqueeze(-1), out.detach(), out)
        stream = border.stream
        # Outside of the model's forward there is no sharded stream, so every rank gets the full sum.
        if not (begins_stream and stream.is_sharded_at("embedding")):
            return sum_ranks(out, border.group)
        # With context parallelism `_with_local_tokens` has already noted the full sequence; `input` is its local tokens.
        if border.tokens.ranks == 1:
            stream.note_embedding(input.shape[border.tokens.dim], begins=True)
        return border.leave(out)

    return subclass(cls, {"forward": forward}, "vocabulary_shard")


@cache
def _with_local_tokens(cls: type[nn.Module], begins_stream: bool) -> type[nn.Module]:
    """Subclass an embedding class with a forward that, inside a forward of the model, embeds only the local tokens."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        border = self._split.border
        tokens = border.tokens
        stream = border.stream
        is_sequence = tokens.dim < input.ndim <= 2  # not chunks [batch, chunks, chunk]
        if not is_sequence or not stream.is_sharded_at("embedding"):
            return cls.forward(self, input)
        stream.note_embedding(input.shape[tokens.dim], begins=begins_stream)
        if stream.runs_in_full:
            return cls.forward(self, input)
        out = cls.forward(self, tokens.take_local(input))
        if begins_stream:
            return out
        return sharded_sequence(
            out, tokens, GatherPermission(False, "vocab_embedding(all_tokens=True)", self._split.key)
        )

    return subclass(cls, {"forward": forward}, "local_tokens")
