"""Collectives on plain local tensors, without gradients; those with gradients are in `collectives`.

The result is ready on return: for the host, or on a GPU for the current CUDA stream, since a Triton kernel can't take a
pending tensor.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanplans.split.layout import shard_size
from titanplans.torch_private.dispatch import has_dispatch_mode
from titanplans.torch_private.distributed import backend_all_gather, backend_of, backend_reduce_scatter

Group = tuple[str, int]
"""A process group's name and size: a compiled graph can hold these, but not a DeviceMesh."""


def group_of(mesh: DeviceMesh) -> Group:
    """Return the group of a 1-D `mesh`."""
    return mesh.get_group().group_name, mesh.size()


# Use the operators themselves, since the names of their Python wrappers change between releases of torch.
_c10d = torch.ops._c10d_functional
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _options(options: Any, operation: dist.ReduceOp.RedOpType | None = None) -> Any:
    """Set the options of a collective whose result can be used on return, on a GPU by the current stream."""
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


def _uses_operators(x: torch.Tensor) -> bool:
    """Whether a collective on `x` goes through torch's functional operators instead of the process group's backend.

    A direct call of the backend takes less than half of the host time of an operator. But a compiler, and a mode that
    watches dispatch (a recorder, selective checkpointing, fake tensors), know only the operators, which issue the same
    collective on the same bytes. The backend can't take complex numbers. The backend is looked up in each call, since a
    restart makes new groups.
    """
    if torch.compiler.is_compiling():
        return True
    return type(x) not in _PLAIN or has_dispatch_mode() or x.is_complex()


def _finish(work: dist.Work | None) -> None:
    """Wait for `work`. NCCL returns None: later kernels on the CUDA stream are ordered after it."""
    if work is not None:
        work.wait()


def all_gather(x: torch.Tensor, dim: int, length: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' `x` along `dim`, truncated to `length`; no gradient."""
    name, ranks = group
    if _uses_operators(x):
        stacked = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), ranks, name))
        full = stacked if dim == 0 else torch.cat(stacked.chunk(ranks), dim)
        return full if full.shape[dim] == length else full.narrow(dim, 0, length).contiguous()
    shape, size = x.shape, x.shape[dim]
    if shape[:dim].numel() == 1:  # the shards are adjacent in memory, so no copy is needed
        full = x.new_empty((*shape[:dim], ranks * size, *shape[dim + 1 :]))
        stacked = full.view(ranks * shape[0], *shape[1:]) if dim else full
        _finish(backend_all_gather(backend_of(name, x.device), stacked, x.contiguous(), _ALL_GATHER))
        return full if ranks * size == length else full.narrow(dim, 0, length)
    stacked = x.new_empty((ranks * shape[0], *shape[1:]))
    _finish(backend_all_gather(backend_of(name, x.device), stacked, x.contiguous(), _ALL_GATHER))
    shards = list(stacked.chunk(ranks))
    if ranks * size != length:
        complete, remainder = divmod(length, size)
        shards[complete:] = [shards[complete].narrow(dim, 0, remainder)] if remainder else []
    return torch.cat(shards, dim)


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sum `x` over the ranks and return this rank's shard along `dim`, padded with zeros; no gradient."""
    name, ranks = group
    size = shard_size(x.shape[dim], ranks)
    x = _padded(x, dim, size * ranks)
    if _uses_operators(x):
        stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
        return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(stacked, "sum", ranks, name))
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    shape = (*before, size, *after)
    if dim:
        # Make each rank's shard contiguous; no copy if they already are.
        x = x.view(*before, ranks, size, *after).movedim(dim, 0).reshape(ranks * shape[0], *shape[1:])
    shard = x.new_empty(shape)
    _finish(backend_reduce_scatter(backend_of(name, x.device), shard, x.contiguous(), _REDUCE_SCATTER))
    return shard


def all_reduce(x: torch.Tensor, group: Group, operation: str = "sum") -> torch.Tensor:
    """Reduce `x` over the ranks of `group` by "sum", "max" or "min"; no gradient."""
    if _uses_operators(x):
        return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), operation, group[0]))
    reduced = x.detach().clone(memory_format=torch.contiguous_format)
    _finish(backend_of(group[0], x.device).allreduce([reduced], _ALL_REDUCE[operation]))
    return reduced


def all_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Send `x[i]` to rank i of `group`; all ranks' shapes are equal; no gradient."""
    return all_to_all_rows(x, [1] * group[1], [1] * group[1], group)


def all_to_all_rows(x: torch.Tensor, received: list[int], sent: list[int], group: Group) -> torch.Tensor:
    """Send `sent[i]` rows of `x` to rank i of `group`, receive `received[i]` rows from it, in rank order; no gradient."""
    name, _ = group
    if _uses_operators(x):
        return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), received, sent, name))
    output = x.new_empty(sum(received), *x.shape[1:])
    _finish(backend_of(name, x.device).alltoall_base(output, x.contiguous(), received, sent, _ALL_TO_ALL))
    return output


def shard_of_rank(x: torch.Tensor, dim: int, rank: int, group: Group) -> torch.Tensor:
    """Return the shard of `x` along `dim` that belongs to `rank`, padded with zeros; no gradient."""
    size = shard_size(x.shape[dim], group[1])
    return _padded(x, dim, size * group[1]).narrow(dim, rank * size, size).contiguous()


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])], dim)
