"""The two borders of a tensor-parallel region, on plain local tensors.

Outside a region lies the residual stream: each rank holds its shard of the sequence (sequence
parallelism) or a replica. Inside, every rank holds the whole sequence and its share of the heads
or of the MLP width, and computes a partial sum of the region's output. `enter` and `leave` cross
the border; their backwards are each other's mirror image (Megatron-LM's f, g and their
sequence-parallel forms, Korthikanti et al. 2022, "Reducing Activation Recomputation", figure 5):

    border   sequence parallel   forward          backward
    enter    yes                 all-gather       reduce-scatter
    enter    no                  identity         all-reduce
    leave    yes                 reduce-scatter   all-gather
    leave    no                  all-reduce       identity

Tensors are local on both sides, so a Triton kernel may stand anywhere, and a compiled graph holds
nothing but the collective and its neighbours, which is what async tensor parallelism looks for.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Group = tuple[str, int]
"""A process group's name and size: a compiled graph can hold these, but not a mesh."""


def stream_placement(sequence_parallel: bool, sequence_dim: int) -> Placement:
    """Return how the residual stream lies on the TP mesh: its sequence sharded, or replicated."""
    return Shard(sequence_dim) if sequence_parallel else Replicate()


class Border:
    """The border between the residual stream and the regions of one TP mesh.

    Args:
        mesh: the 1-D TP mesh.
        stream: placement of the residual stream, `Shard(sequence_dim)` or `Replicate()`.
    """

    def __init__(self, mesh: DeviceMesh, stream: Placement):
        self.group: Group = (mesh.get_group().group_name, mesh.size())
        self.dim = stream.dim if isinstance(stream, Shard) else None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Bring the stream's local tensor `x` into a region: the whole sequence on every rank.

        Each rank's gradient of the result is partial (it has seen its own share of the heads only);
        the backward sums them and lays the sum out as the stream.
        """
        return (
            _SumGradients.apply(x, self.group) if self.dim is None else _Gather.apply(x, self.dim, self.group)
        )

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the partial results `x` of a region over the ranks and lay the sum out as the stream."""
        return _Sum.apply(x, self.group) if self.dim is None else _ScatterSum.apply(x, self.dim, self.group)


def gather_shards(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Gather the shards `x` along `dim`. What follows is the same on every rank, so its gradient is whole."""
    return _GatherShards.apply(x, mesh, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return _all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return grad, None


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, mesh, dim):
        ctx.mesh, ctx.dim = mesh, dim
        shards = DTensor.from_local(x, mesh, (Shard(dim),), run_check=False)
        return shards.redistribute(placements=(Replicate(),)).to_local()

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        whole = DTensor.from_local(grad, ctx.mesh, (Replicate(),), run_check=False)
        return whole.redistribute(placements=(Shard(ctx.dim),)).to_local(), None, None


# The operators themselves rather than their Python wrappers, whose names change between releases
# of torch; waiting at once, since a Triton kernel can't read a pending wrapper.
_c10d = torch.ops._c10d_functional


def _all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    name, ranks = group
    stacked = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), ranks, name))
    return stacked if dim == 0 else torch.cat(stacked.chunk(ranks), dim)


def _reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    name, ranks = group
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(stacked, "sum", ranks, name))


def _all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group[0]))
