"""The residual stream, and the borders between it and a tensor-parallel region, on plain local tensors.

On the stream each rank holds its shard of the sequence (sequence parallelism) or a replica. Inside a
region every rank holds the whole sequence and its share of the heads or of the MLP width, and
computes a partial sum of the region's output. `enter` and `leave` cross the border; their backwards
are each other's mirror image (Megatron-LM's f, g and their sequence-parallel forms, Korthikanti et
al. 2022, "Reducing Activation Recomputation", figure 5):

    border   sequence parallel   forward          backward
    enter    yes                 all-gather       reduce-scatter
    enter    no                  identity         all-reduce
    leave    yes                 reduce-scatter   all-gather
    leave    no                  all-reduce       identity
    begin    yes                 own shard        all-gather
    begin    no                  identity         identity

Tensors are local on both sides, so a Triton kernel may stand anywhere, and a compiled graph holds
nothing but the collective and its neighbours, which is what async tensor parallelism looks for.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titanplans.errors import PlanError

Group = tuple[str, int]
"""A process group's name and size: a compiled graph can hold these, but not a mesh."""


class Stream:
    """The residual stream of one split model, between its regions; all styles of a plan share one.

    Sharded, each rank holds `ceil(length / ranks)` tokens, the last ones filled up with zeros where
    the length is not a multiple: what works token by token does not mind, regions never see them.

    Args:
        sequence_parallel: the sequence is sharded; otherwise every rank holds all of it.
        sequence_dim: the dimension of the hidden states that is the sequence.
    """

    def __init__(self, sequence_parallel: bool, sequence_dim: int):
        self.dim = sequence_dim if sequence_parallel else None
        self.length = 0
        """Tokens of the whole sequence in the forward that runs now; set where the stream begins."""

    @property
    def placement(self) -> Placement:
        """How the hidden states lie on the TP mesh."""
        return Replicate() if self.dim is None else Shard(self.dim)

    @property
    def gradient(self) -> Placement:
        """How the gradient of a replicated parameter on the stream lies on the TP mesh."""
        return Replicate() if self.dim is None else Partial()

    def __repr__(self) -> str:
        return repr(self.placement)


class Border:
    """The border between the residual stream and the regions of one 1-D TP mesh."""

    def __init__(self, mesh: DeviceMesh, stream: Stream):
        self.stream = stream
        self.group: Group = (mesh.get_group().group_name, mesh.size())
        self.rank = mesh.get_local_rank()

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Lay `x`, whole on every rank, out as the stream: each rank takes its shard.

        What comes before is the same on every rank, and its gradient is whole there: gathered.
        """
        if self.stream.dim is None:
            return x
        self.stream.length = x.shape[self.stream.dim]
        return _TakeShard.apply(x, self.stream.dim, self.rank, self.group)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Bring the stream's local tensor `x` into a region: the whole sequence on every rank.

        Each rank's gradient of the result is partial (it has seen its own share of the heads only);
        the backward sums them and lays the sum out as the stream.
        """
        if self.stream.dim is None:
            return _SumGradients.apply(x, self.group)
        self.check_shard(x)
        return _Gather.apply(x, self.stream.dim, self.stream.length, self.group)

    def check_shard(self, x: torch.Tensor) -> None:
        """Refuse a shard of another length than the newest forward's.

        Raises:
            PlanError: two forwards of different length before one backward, under activation checkpointing.
        """
        assert self.stream.dim is not None
        # A stream that has not begun is a wrong plan, whose place a proof tells better.
        if self.stream.length and shard_size(self.stream.length, self.group[1]) != x.shape[self.stream.dim]:
            raise PlanError(
                f"a region was entered by shards of {x.shape[self.stream.dim]} tokens on each of {self.group[1]} ranks, but "
                f"the newest forward has {self.stream.length} tokens in all: under activation checkpointing with sequence "
                "parallelism run backward before a forward of another length, or fill both up to one length"
            )

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the partial results `x` of a region over the ranks and lay the sum out as the stream."""
        if self.stream.dim is None:
            return _Sum.apply(x, self.group)
        return _ScatterSum.apply(x, self.stream.dim, self.group)


def shard_size(length: int, ranks: int) -> int:
    """Return how much of `length` a rank holds, the last ones perhaps less: as `torch.chunk` and DTensor."""
    return -(length // -ranks)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, length, group):
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, group):
        ctx.dim, ctx.length, ctx.group = dim, x.shape[dim], group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return all_gather(grad, ctx.dim, ctx.length, ctx.group), None, None


class _TakeShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, rank, group):
        ctx.dim, ctx.length, ctx.group = dim, x.shape[dim], group
        size = shard_size(ctx.length, group[1])
        return _padded(x, dim, size * group[1]).narrow(dim, rank * size, size).contiguous()

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return all_gather(grad, ctx.dim, ctx.length, ctx.group), None, None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return grad, None


# The operators themselves rather than their Python wrappers, whose names change between releases
# of torch; waiting at once, since a Triton kernel can't read a pending wrapper.
_c10d = torch.ops._c10d_functional


def all_gather(x: torch.Tensor, dim: int, length: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' `x` along `dim`, cut it to `length`, and wait; no gradient."""
    name, ranks = group
    stacked = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), ranks, name))
    whole = stacked if dim == 0 else torch.cat(stacked.chunk(ranks), dim)
    return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length).contiguous()


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sum the ranks' `x`, give each its shard of `dim`, filled up with zeros, and wait; no gradient."""
    name, ranks = group
    x = _padded(x, dim, shard_size(x.shape[dim], ranks) * ranks)
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(stacked, "sum", ranks, name))


def all_reduce(x: torch.Tensor, group: Group, operation: str = "sum") -> torch.Tensor:
    """Reduce `x` over the ranks of `group`, and wait; no gradient."""
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), operation, group[0]))


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])], dim)
