"""`fully_shard` at a cost that does not grow with the number of ranks.

FSDP2 of torch 2.13 does two things for each parameter in proportion to the world, of which a rank needs nothing:
it lists the shards of all ranks to take its own, and for a parameter that is split over tensor-parallel ranks it
joins the two meshes into a new one, which keeps a tuple of all ranks (150 kB at 4,096). Here are what makes one
shard when it is asked for, and one mesh for all parameters. Private names of torch are replaced for the time of a
`with` block, in this file only; what FSDP2 is told to do is in `fsdp`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param


@contextmanager
def independent_of_world() -> Iterator[None]:
    """Let `fully_shard` in the body do the work of one rank; it makes the same shards on equal meshes."""
    chunk, concatenate = _fsdp_param._chunk_with_empty, DeviceMesh._concatenate
    joined: dict[tuple[DeviceMesh, ...], DeviceMesh] = {}

    def join(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(meshes)
        if key not in joined:
            joined[key] = concatenate(meshes)
        return joined[key]

    _fsdp_param._chunk_with_empty = Shards  # type: ignore[assignment]
    DeviceMesh._concatenate = staticmethod(join)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = chunk
        DeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign]


class Shards(Sequence[torch.Tensor]):
    """What `torch.chunk(tensor, number, dim)` returns, filled up to `number` with empty tensors, one by one."""

    def __init__(self, tensor: torch.Tensor, number: int, dim: int):
        self.tensor, self.number, self.dim = tensor, number, dim
        self.length = -(-tensor.shape[dim] // number)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index):  # type: ignore[override]
        if not 0 <= index < self.number:
            raise IndexError(f"shard {index} of {self.number}")
        first = index * self.length
        left = self.tensor.shape[self.dim] - first
        if index and left <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, first, min(self.length, left))
