"""Collectives on plain local tensors, without gradients; those with gradients are in `collectives`.

An eager step calls the process group's backend itself, which costs the host less than half of what an operator does. The
backend is looked up for each call, so that a new group after a restart is found. A compiler, and a mode that
watches what is dispatched (a recorder, a selective checkpoint, fake tensors), get torch's functional
operators instead, which they know: the same collective on the same bytes. Either way the result is there on return, for the
host, or on a GPU for its stream: a Triton kernel can't read a pending wrapper.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanplans.split.layout import shard_size
from titanplans.torch_private.dispatch import dispatch_is_watched
from titanplans.torch_private.distributed import backend_all_gather, backend_of, backend_reduce_scatter

Group = tuple[str, int]
"""A process group's name and size: a compiled graph can hold these, but not a mesh."""


def group_of(mesh: DeviceMesh) -> Group:
    """Return the group of a 1-D `mesh`."""
    return mesh.get_group().group_name, mesh.size()


# The operators themselves rather than their Python wrappers, whose names change between releases of torch.
_c10d = torch.ops._c10d_functional
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _options(options: Any, operation: dist.ReduceOp.RedOpType | None = None) -> Any:
    """Return the options of a collective whose result is there on return, on a GPU for the stream."""
    options.asyncOp = False
    if operation is not None:
        options.reduceOp = operation
    return options


_ALL_GATHER = _options(dist.distributed_c10d.AllgatherOptions())
_ALL_TO_ALL = _options(dist.AllToAllOptions())
_REDUCE_SCATTER = _options(dist.ReduceScatterOptions())
_ALL_REDUCE = {
    "sum": _options(dist.AllreduceOptions(), dist.ReduceOp.SUM),
    "max": _options(dist.AllreduceOptions(), dist.ReduceOp.MAX),
    "min": _options(dist.AllreduceOptions(), dist.ReduceOp.MIN),
}


def _by_operators(x: torch.Tensor) -> bool:
    """Whether collectives on `x` are operators; raw ones can't take complex numbers."""
    if torch.compiler.is_compiling():
        return True
    return type(x) not in _PLAIN or dispatch_is_watched() or x.is_complex()


def _finish(work: dist.Work | None) -> None:
    """Wait for `work`. NCCL returns none: what follows on the stream is ordered already."""
    if work is not None:
        work.wait()


def all_gather(x: torch.Tensor, dim: int, length: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' `x` along `dim` and cut it to `length`; no gradient."""
    name, ranks = group
    if _by_operators(x):
        stacked = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), ranks, name))
        full = stacked if dim == 0 else torch.cat(stacked.chunk(ranks), dim)
        return full if full.shape[dim] == length else full.narrow(dim, 0, length).contiguous()
    shape, size = x.shape, x.shape[dim]
    if shape[:dim].numel() == 1:  # the shards lie one after the other already
        full = x.new_empty((*shape[:dim], ranks * size, *shape[dim + 1 :]))
        stacked = full.view(ranks * shape[0], *shape[1:]) if dim else full
        _finish(backend_all_gather(backend_of(name, x.device), stacked, x.contiguous(), _ALL_GATHER))
        return full if ranks * size == length else full.narrow(dim, 0, length)
    stacked = x.new_empty((ranks * shape[0], *shape[1:]))
    _finish(backend_all_gather(backend_of(name, x.device), stacked, x.contiguous(), _ALL_GATHER))
    shards = list(stacked.chunk(ranks))
    if ranks * size != length:
        full, rest = divmod(length, size)
        shards[full:] = [shards[full].narrow(dim, 0, rest)] if rest else []
    return torch.cat(shards, dim)


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sum the ranks' `x` and give each its shard of `dim`, filled up with zeros; no gradient."""
    name, ranks = group
    size = shard_size(x.shape[dim], ranks)
    x = _padded(x, dim, size * ranks)
    if _by_operators(x):
        stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
        return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(stacked, "sum", ranks, name))
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    shape = (*before, size, *after)
    if dim:
        # The ranks' shards, one after the other; a view where they lie so already.
        x = x.view(*before, ranks, size, *after).movedim(dim, 0).reshape(ranks * shape[0], *shape[1:])
    mine = x.new_empty(shape)
    _finish(backend_reduce_scatter(backend_of(name, x.device), mine, x.contiguous(), _REDUCE_SCATTER))
    return mine


def all_reduce(x: torch.Tensor, group: Group, operation: str = "sum") -> torch.Tensor:
    """Reduce `x` over the ranks of `group`: "sum", "max" or "min"; no gradient."""
    if _by_operators(x):
        return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), operation, group[0]))
    reduced = x.detach().clone(memory_format=torch.contiguous_format)
    _finish(backend_of(group[0], x.device).allreduce([reduced], _ALL_REDUCE[operation]))
    return reduced


def all_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Send `x[i]` to rank i of `group`, whose ranks' shapes are equal; no gradient."""
    return all_to_all_rows(x, [1] * group[1], [1] * group[1], group)


def all_to_all_rows(x: torch.Tensor, received: list[int], sent: list[int], group: Group) -> torch.Tensor:
    """Send `sent[i]` rows of `x` to rank i of `group` and receive `received[i]` from it, in order; no gradient."""
    name, _ = group
    if _by_operators(x):
        return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), received, sent, name))
    came = x.new_empty(sum(received), *x.shape[1:])
    _finish(backend_of(name, x.device).alltoall_base(came, x.contiguous(), received, sent, _ALL_TO_ALL))
    return came


def own_shard(x: torch.Tensor, dim: int, rank: int, group: Group) -> torch.Tensor:
    """Return the shard of `dim` of `x` that belongs to `rank`, filled up with zeros; no gradient."""
    size = shard_size(x.shape[dim], group[1])
    return _padded(x, dim, size * group[1]).narrow(dim, rank * size, size).contiguous()


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])], dim)
