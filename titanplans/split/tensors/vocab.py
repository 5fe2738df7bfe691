"""The embedding and the head, cut by weights: each rank has a shard of the vocabulary.

Each rank embeds the ids in its shard, and the ranks' outputs are summed. This works on local tensors, so that subclasses
which do more than look up (a scaled embedding) work as they are, and `padding_idx` keeps its meaning.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titanplans.plan.layout import shard_size
from titanplans.plan.styles.base import held
from titanplans.plan.styles.vocab import VocabEmbedding, VocabHead
from titanplans.split.collectives import collect, sum_ranks
from titanplans.split.costs import Call, ExpectedCollective, entered, even
from titanplans.split.parameters.local_parameters import read_inside
from titanplans.split.state import make_state, specialise, subclass
from titanplans.split.stream import Border
from titanplans.split.tensors.rules import Rule, Site, on_input
from titanplans.torch_private.dispatch import assert_async


def _install_embedding(style: VocabEmbedding, module: nn.Module, site: Site) -> None:
    make_state(module).border = site.border
    specialise(module, read_inside(_on_rows(type(module), style.begins_stream), ("weight",)))


def _expect_embedding(style: VocabEmbedding, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    *_, length = ids = call.given[0]
    width = held(module)["weight"].shape[1]
    if call.dim is None:
        return (ExpectedCollective(("all_reduce",), (), ids.numel() * width),)
    elements = ids.numel() // length * even(length, call.degree) * width
    return (
        ExpectedCollective(
            ("reduce_scatter", "all_reduce"), ("all_gather",) if style.begins_stream else (), elements
        ),
    )


@cache
def _on_rows(cls: type[nn.Module], begins_stream: bool) -> type[nn.Module]:
    """Subclass an embedding class with a forward that works on this rank's rows."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        border = self._split.border
        if border.mesh is None:
            return cls.forward(self, input)
        rows = self._parameters["weight"].shape[0]
        size = shard_size(rows, border.group[1])
        # One clamp and one comparison are a kernel less than two bounds.
        assert_async(input.clamp(0, rows - 1).eq(input).all(), "a token id outside of the vocabulary")
        local_ids = input - border.rank * size
        elsewhere = local_ids.clamp(0, size - 1).ne(local_ids)
        padding = self.padding_idx
        # padding_idx is a row of the whole table; its gradient is stopped below.
        self.padding_idx = None
        try:
            out = cls.forward(self, local_ids.masked_fill(elsewhere, 0))
        finally:
            self.padding_idx = padding
        out = out.masked_fill(elsewhere.unsqueeze(-1), 0)
        if padding is not None:
            out = torch.where(torch.eq(input, padding).unsqueeze(-1), out.detach(), out)
        if not (begins_stream and border.stream.is_sharded()):  # or called outside of the model's forward
            return sum_ranks(out, border.group)
        border.stream.begun, border.stream.length = True, input.shape[border.tokens.dim]
        return border.leave(out)

    return subclass(cls, {"forward": forward})


def _install_head(style: VocabHead, module: nn.Module, site: Site) -> None:
    vocabulary = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
    specialise(module, read_inside(type(module), tuple(held(module))))
    head = _Head(style, site.border, vocabulary)
    module.register_forward_pre_hook(head.enter, with_kwargs=True)
    module.register_forward_hook(head.leave)


def _expect_head(style: VocabHead, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    return (entered(call),)


class _Head:
    """The hooks of a head: it takes the stream's shard, or whole hidden states after its end; logits are sharded."""

    def __init__(self, style: VocabHead, border: Border, vocabulary: int):
        self.style, self.border, self.vocabulary, self.length = style, border, vocabulary, 0

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return on_input(self._enter, self.style, "input", module, args, kwargs)

    def _enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        border = self.border
        sharded = border.stream.is_sharded()
        if border.tokens.ranks > 1:
            dim = border.tokens.dim
            self.length = border.length_of(hidden_states) if sharded else hidden_states.shape[dim]
            hidden_states = hidden_states if sharded else border.tokens.own(hidden_states)
        return border.enter(hidden_states) if sharded else border.enter_whole(hidden_states)

    def leave(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if getattr(type(output), "deferred", False):  # a loss computed inside the head
            return output
        border, dim, tokens = self.border, output.ndim - 1, self.border.tokens
        whole, meshes, sizes = border.stream.whole_logits, border.meshes, {}
        if split := meshes.tp is not None and self.style.loss_parallel and not whole:
            sizes = {dim: self.vocabulary}
        elif meshes.tp is not None:
            output = _gather_shards(output, border, dim, self.vocabulary)
        if whole:
            return tokens.gather(output, self.length)
        if meshes.cp is not None:
            output = output.narrow(tokens.dim, 0, tokens.number(self.length))
            sizes = {tokens.dim: self.length} | sizes
        mesh = meshes.both if split else meshes.cp
        return output if mesh is None else _shards_of(output, mesh, sizes)


def _shards_of(x: torch.Tensor, mesh: DeviceMesh, sizes: Mapping[int, int]) -> DTensor:
    """Return local shards `x` as a DTensor: the axes of `mesh` shard the dimensions in `sizes`, by their lengths."""
    shape = [sizes.get(dim, size) for dim, size in enumerate(x.shape)]
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(dim) for dim in sizes]
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _gather_shards(x: torch.Tensor, border: Border, dim: int, size: int) -> torch.Tensor:
    """All-gather the shards `x` of a tensor of length `size` in `dim`, its last; later code is the same on every rank."""
    missing = shard_size(size, border.group[1]) - x.shape[dim]
    padded = nn.functional.pad(x, (0, missing)) if missing else x
    return collect(padded, dim, size, border.rank, border.group)


EMBEDDING, HEAD = Rule(_install_embedding, _expect_embedding), Rule(_install_head, _expect_head)
