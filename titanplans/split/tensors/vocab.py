"""The two ends of a model, cut by weights: each rank has its rows of the vocabulary.

Of the embedding each rank looks up the rows that it holds, and a sum makes the whole. It is written for local tensors, so
that subclasses which do more than look up (a scaled embedding) work as they are, and `padding_idx` keeps its meaning.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanplans.plan.layout import StreamLayout, shard_size
from titanplans.plan.styles.base import held
from titanplans.plan.styles.vocab import VocabEmbedding, VocabHead
from titanplans.split.collectives import collect, sum_ranks
from titanplans.split.costs import Call, ExpectedCollective, entered, even
from titanplans.split.parameters.local_parameters import read_inside
from titanplans.split.state import make_state, specialise, subclass
from titanplans.split.stream import Border, Stream
from titanplans.split.tensors.rules import Rule
from titanplans.torch_private.dispatch import assert_async


def _install_embedding(style: VocabEmbedding, module: nn.Module, border: Border) -> None:
    whole = Border(border.mesh, Stream(StreamLayout(None)))
    make_state(module).border = border if style.begins_stream else whole
    specialise(module, read_inside(_on_rows(type(module)), ("weight",)))


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
def _on_rows(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass an embedding class with a forward that works on this rank's rows."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        border = self._split.border
        rows = self._parameters["weight"].shape[0]
        size = shard_size(rows, border.group[1])
        # Clamped and compared: two kernels, where two bounds take three.
        assert_async(input.clamp(0, rows - 1).eq(input).all(), "a token id outside of the vocabulary")
        local_ids = input - border.rank * size
        elsewhere = local_ids.clamp(0, size - 1).ne(local_ids)
        padding = self.padding_idx
        # A shard does not know the padding row's global number: its gradient is stopped below.
        self.padding_idx = None
        try:
            out = cls.forward(self, local_ids.masked_fill(elsewhere, 0))
        finally:
            self.padding_idx = padding
        out = out.masked_fill(elsewhere.unsqueeze(-1), 0)
        if padding is not None:
            out = torch.where(torch.eq(input, padding).unsqueeze(-1), out.detach(), out)
        if not border.stream.is_sharded():  # called outside of a forward, for one
            return sum_ranks(out, border.group)
        border.stream.begun, border.stream.length = True, input.shape[border.stream.dim]
        return border.leave(out)

    return subclass(cls, {"forward": forward})


def _install_head(style: VocabHead, module: nn.Module, border: Border) -> None:
    vocabulary = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
    specialise(module, read_inside(type(module), tuple(held(module))))
    module.register_forward_pre_hook(partial(_enter, border))
    module.register_forward_hook(partial(_logits, style, border, vocabulary))


def _expect_head(style: VocabHead, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    return (entered(call),)


def _enter(border: Border, module: nn.Module, args: Any) -> Any:
    hidden_states, *others = args
    enter = border.enter if border.stream.is_sharded() else border.enter_whole
    return enter(hidden_states), *others


def _logits(
    style: VocabHead, border: Border, vocabulary: int, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    if getattr(type(output), "deferred", False):  # a loss computed inside the head
        return output
    if style.loss_parallel and not border.stream.whole_logits:
        return _shards_of(output, border.mesh, output.ndim - 1, vocabulary)
    return _gather_shards(output, border, output.ndim - 1, vocabulary)


def _shards_of(x: torch.Tensor, mesh: DeviceMesh, dim: int, size: int) -> DTensor:
    """Return the DTensor of length `size` in `dim` whose shard on each rank of `mesh` is `x`."""
    shape = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, (Shard(dim),), run_check=False, shape=torch.Size(shape), stride=stride)


def _gather_shards(x: torch.Tensor, border: Border, dim: int, size: int) -> torch.Tensor:
    """Gather the shards `x` of something `size` long in `dim`.

    What follows is the same on every rank, so its gradient is whole there.
    """
    if size % border.group[1] == 0:
        return collect(x, dim, size, border.rank, border.group)
    return _GatherShards.apply(x, border.mesh, dim, size)


class _GatherShards(torch.autograd.Function):
    """Shards that are not equally large: DTensor fills them up, and takes a fifth of a millisecond for it."""

    @staticmethod
    def forward(ctx: Any, x, mesh, dim, size):
        ctx.mesh, ctx.dim = mesh, dim
        return _shards_of(x, mesh, dim, size).redistribute(placements=(Replicate(),)).to_local()

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return _GatherShardsBackward.apply(grad, ctx.mesh, ctx.dim), None, None, None


class _GatherShardsBackward(torch.autograd.Function):
    """The backward of `_GatherShards`, whose backward it is."""

    @staticmethod
    def forward(ctx: Any, x, mesh, dim):
        ctx.mesh, ctx.dim, ctx.size = mesh, dim, x.shape[dim]
        whole = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
        return whole.redistribute(placements=(Shard(dim),)).to_local()

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return _GatherShards.apply(grad, ctx.mesh, ctx.dim, ctx.size), None, None


EMBEDDING, HEAD = Rule(_install_embedding, _expect_embedding), Rule(_install_head, _expect_head)
