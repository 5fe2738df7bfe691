"""`fully_shard` at a cost that does not grow with the number of ranks.

For each parameter FSDP2 of torch 2.13 chunks the tensor for all ranks, to take one chunk; and for a parameter that is
split over tensor-parallel ranks it makes a mesh of both dimensions, which holds a tuple of all ranks (150 kB at 4,096).
Here a chunk is made when it is asked for, and one mesh serves all parameters. docs/benchmarks.md has the figures.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param  # private: torch chunks all shards

from titanplans.torch_private.swapped import swapped


@contextmanager
def independent_of_world() -> Iterator[None]:  # private: torch chunks all shards
    """Let `fully_shard` do the work of one rank inside; the shards and meshes are equal."""
    concatenate = DeviceMesh._concatenate
    once = cache(lambda meshes: concatenate(list(meshes)))
    cached = staticmethod(lambda meshes: once(tuple(meshes)))
    with swapped(_fsdp_param, "_chunk_with_empty", Chunks), swapped(DeviceMesh, "_concatenate", cached):
        yield


class Chunks(Sequence[torch.Tensor]):
    """What `torch.chunk(tensor, number, dim)` returns, filled up to `number` with empty tensors; made one by one."""

    def __init__(self, tensor: torch.Tensor, number: int, dim: int):
        self.tensor, self.number, self.dim = tensor, number, dim
        self.length = -(-tensor.shape[dim] // number)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index):  # type: ignore[override]
        if not 0 <= index < self.number:
            raise IndexError(f"chunk {index} of {self.number}")
        first = index * self.length
        left = self.tensor.shape[self.dim] - first
        if index and left <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, first, min(self.length, left))
