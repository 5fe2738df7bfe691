"""Make the cost of `fully_shard` independent of the number of ranks. docs/benchmarks.md has measurements."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param  # private: torch chunks all shards

from titanplans.torch_private.swapped import swapped


@contextmanager
def independent_of_world() -> Iterator[None]:  # private: torch chunks all shards
    """In the body of the `with`, `fully_shard` does only this rank's work. The resulting shards and meshes are the usual
    ones.

    FSDP2 of torch 2.13 makes the chunks of each parameter for all ranks, and uses one chunk. For each parameter that is
    split over tensor-parallel ranks it also creates a 2-D mesh, which holds a tuple of all ranks (150 kB at 4,096 ranks).
    Here chunks are made only when they are used, and equal meshes are created once.
    """
    concatenate = DeviceMesh._concatenate
    once = cache(lambda meshes: concatenate(list(meshes)))
    cached = staticmethod(lambda meshes: once(tuple(meshes)))
    with swapped(_fsdp_param, "_chunk_with_empty", Chunks), swapped(DeviceMesh, "_concatenate", cached):
        yield


class Chunks(Sequence[torch.Tensor]):
    """The chunks of `torch.chunk(tensor, number, dim)`, padded to `number` by empty tensors, each created when indexed."""

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
