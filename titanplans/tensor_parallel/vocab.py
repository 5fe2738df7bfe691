"""The two ends of a model, whose vocabulary is sharded: the embedding and the head.

Of the embedding each rank looks up the rows that it holds, and a sum makes the whole. It is written for local tensors, so
that subclasses which do more than look up (a scaled embedding) work as they are, and `padding_idx` keeps its meaning.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanplans.tensor_parallel.collectives import collect, shard_size, sum_ranks
from titanplans.tensor_parallel.layout import Layout
from titanplans.tensor_parallel.local_parameters import read_inside, subclass
from titanplans.tensor_parallel.loss.cross_entropy import refuse_torchs
from titanplans.tensor_parallel.loss.stand_in import StandIn
from titanplans.tensor_parallel.sent import Call, Sent, entered, even
from titanplans.tensor_parallel.stream import Border, Stream
from titanplans.tensor_parallel.styles import Style, border_of, held
from titanplans.torch_private import assert_async


class VocabEmbedding(Style):
    """Shard an embedding's rows; the output is summed over the ranks.

    Args:
        stream: the residual stream.
        begins_stream: in a forward the sum is laid out as the stream, which with sequence parallelism saves half of
            its bytes. For models that draw no conclusion (positions, masks, where images belong) from
            the embeddings; otherwise they are whole on every rank, and the stream begins at the first block.
    """

    def __init__(self, *, stream: Stream, begins_stream: bool):
        self.stream, self.begins_stream = stream, begins_stream

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        return {"weight": Layout(Shard(0), Shard(0))}

    def refusal(self, module: nn.Module) -> str | None:
        if getattr(module, "max_norm", None) is not None:
            return f"max_norm = {module.max_norm} renormalises rows in place, which a shard can't: set it to None"
        return None

    def sends(self, module: nn.Module, call: Call) -> tuple[Sent, ...]:
        *_, length = ids = call.given[0]
        width = held(module)["weight"].shape[1]
        if call.dim is None:
            return (Sent(("all_reduce",), (), ids.numel() * width),)
        elements = ids.numel() // length * even(length, call.degree) * width
        return (
            Sent(("reduce_scatter", "all_reduce"), ("all_gather",) if self.begins_stream else (), elements),
        )

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        rows = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
        border = Border(mesh, self.stream if self.begins_stream else Stream(False, 0))
        module.__class__ = read_inside(_on_rows(type(module)), ("weight",))
        module.__dict__["_tp_rows"] = (shard_size(rows, mesh.size()), rows, border)


@cache
def _on_rows(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass an embedding class with a forward that works on this rank's rows."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        size, rows, border = self._tp_rows
        # Clamped and compared: two kernels, where two bounds take three.
        assert_async(input.clamp(0, rows - 1).eq(input).all(), "a token id outside of the vocabulary")
        # By `narrow`, not by arithmetic on the rank: it also differs between ranks that one process simulates.
        firsts = torch.arange(0, border.group[1] * size, size, device=input.device)
        local_ids = input - firsts.narrow(0, border.rank, 1)
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


class VocabHead(Style):
    """Shard the head's vocabulary.

    The logits are a DTensor, `Shard(-1)`, for a loss that works on vocabulary shards
    (`loss_parallel`), or else gathered to a plain tensor that is whole on every rank.
    """

    def __init__(self, *, stream: Stream, loss_parallel: bool):
        self.stream, self.loss_parallel = stream, loss_parallel

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Shard(0), Shard(0))

    def split(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        return {"outputs": True}

    def sends(self, module: nn.Module, call: Call) -> tuple[Sent, ...]:
        return (entered(call),)

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        border = border_of(module, mesh, self.stream)
        if self.loss_parallel:
            refuse_torchs()
        module.__class__ = read_inside(type(module), tuple(held(module)))
        module.register_forward_pre_hook(partial(_enter, border))
        vocabulary = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
        module.register_forward_hook(partial(self._logits, border, vocabulary))

    def _logits(self, border: Border, vocabulary, module, args, output: torch.Tensor) -> torch.Tensor:
        if isinstance(output, StandIn):
            return output
        if self.loss_parallel and not self.stream.whole_logits:
            return _shards_of(output, border.mesh, output.ndim - 1, vocabulary)
        return _gather_shards(output, border, output.ndim - 1, vocabulary)


def _enter(border: Border, module, args):
    hidden_states, *others = args
    enter = border.enter if border.stream.is_sharded() else border.enter_whole
    return enter(hidden_states), *others


def _shards_of(x: torch.Tensor, mesh: DeviceMesh, dim: int, size: int) -> DTensor:
    """Return the DTensor that is `size` long in `dim` and of which each rank of `mesh` holds `x`."""
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
        return _TakeShard.apply(grad, ctx.mesh, ctx.dim), None, None, None


class _TakeShard(torch.autograd.Function):
    """The backward of `_GatherShards`, whose backward it is."""

    @staticmethod
    def forward(ctx: Any, x, mesh, dim):
        ctx.mesh, ctx.dim, ctx.size = mesh, dim, x.shape[dim]
        whole = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
        return whole.redistribute(placements=(Shard(dim),)).to_local()

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return _GatherShards.apply(grad, ctx.mesh, ctx.dim, ctx.size), None, None
