"""Collectives on plain local tensors, with and without gradients.

    function         forward         backward
    gather           all-gather      reduce-scatter   the ranks' gradients of the whole are shares: summed
    collect          all-gather      own shard        the same gradient of the whole on every rank
    scatter_sum      reduce-scatter  all-gather
    take_shard       own shard       all-gather
    sum_ranks        all-reduce      identity
    sum_gradients    identity        all-reduce
    exchange         all-to-all      all-to-all

Pairs, in each of which one is the other's backward (an exchange's is an exchange); so a backward may be differentiated
again. A sequence that the number of ranks does not divide is filled up with zeros.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

Group = tuple[str, int]
"""A process group's name and size: a compiled graph can hold these, but not a mesh."""


def group_of(mesh: DeviceMesh) -> Group:
    """Return the group of a 1-D `mesh`."""
    return mesh.get_group().group_name, mesh.size()


def gather(x: torch.Tensor, dim: int, length: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' shards `x` along `dim`, `length` long; what follows is each rank's share of the work."""
    return _apply(_Gather, all_gather, x, dim, length, group)


def collect(x: torch.Tensor, dim: int, length: int, rank: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' shards `x` along `dim`, `length` long; what follows is the same on every rank."""
    return _apply(
        _Collect,
        lambda x, dim, length, _, group: all_gather(x, dim, length, group),
        x,
        dim,
        length,
        rank,
        group,
    )


def scatter_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sum the ranks' `x` and give each its shard of `dim`."""
    return _apply(_ScatterSum, reduce_scatter, x, dim, group)


def take_shard(x: torch.Tensor, dim: int, rank: int, group: Group) -> torch.Tensor:
    """Take this rank's shard of `dim` of `x`, which is whole on every rank."""
    return _apply(_TakeShard, own_shard, x, dim, rank, group)


def sum_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' `x`; what follows is the same on every rank."""
    return _apply(_Sum, all_reduce, x, group)


def sum_gradients(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, which is whole on every rank; what follows is each rank's share of the work."""
    return _apply(_SumGradients, lambda x, group: x, x, group)


def sum_in_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' `x`; each goes on with its share of the work, so the gradients of the sum are shares, too."""
    return sum_gradients(sum_ranks(x, group), group)


def exchange(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Send `x[i]` to rank i; return the same shape, of which `[i]` has come from rank i."""
    return _apply(_Exchange, all_to_all, x, group)


def _apply(function: Any, without_gradient: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    # A backward runs without gradients, unless it is to be differentiated again.
    return function.apply(x, *args) if torch.is_grad_enabled() else without_gradient(x, *args)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, length, group):
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return scatter_sum(grad, ctx.dim, ctx.group), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, length, rank, group):
        ctx.dim, ctx.rank, ctx.group = dim, rank, group
        return all_gather(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return take_shard(grad, ctx.dim, ctx.rank, ctx.group), None, None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, group):
        ctx.dim, ctx.length, ctx.group = dim, x.shape[dim], group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return gather(grad, ctx.dim, ctx.length, ctx.group), None, None


class _TakeShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, rank, group):
        ctx.dim, ctx.length, ctx.rank, ctx.group = dim, x.shape[dim], rank, group
        return own_shard(x, dim, rank, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return collect(grad, ctx.dim, ctx.length, ctx.rank, ctx.group), None, None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return sum_ranks(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return sum_gradients(grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return exchange(grad, ctx.group), None


# Without gradients. The operators themselves rather than their Python wrappers, whose names change between releases
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


def all_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Send `x[i]` to rank i of `group`, whose ranks' shapes are equal, and wait; no gradient."""
    name, ranks = group
    return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), [1] * ranks, [1] * ranks, name))


def own_shard(x: torch.Tensor, dim: int, rank: int, group: Group) -> torch.Tensor:
    """Return the shard of `dim` of `x` that belongs to `rank`, filled up with zeros; no gradient."""
    size = shard_size(x.shape[dim], group[1])
    return _padded(x, dim, size * group[1]).narrow(dim, rank * size, size).contiguous()


def shard_size(length: int, ranks: int) -> int:
    """Return how much of `length` a rank holds, the last ones perhaps less: as `torch.chunk` and DTensor."""
    return -(length // -ranks)


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])], dim)
