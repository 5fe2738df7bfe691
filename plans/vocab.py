"""The vocabulary-parallel embedding: each rank looks up the rows it holds, a sum makes the whole.

Written for local tensors, so that subclasses which do more than look up (a scaled embedding)
work as they are, and `padding_idx` keeps its meaning on a shard.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from plans.collectives import Border
from plans.errors import PlanError
from plans.local import Layout
from plans.styles import Style


class VocabEmbedding(Style):
    """Shard an embedding's rows; the output is summed over the ranks and laid out as the stream."""

    vocabulary = True

    def __init__(self, *, stream: Placement):
        self.stream = stream

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        return {"weight": Layout(Shard(0), Shard(0))}

    def refusal(self, module: nn.Module) -> str | None:
        if getattr(module, "max_norm", None) is not None:
            return f"max_norm = {module.max_norm} renormalises rows in place, which a shard can't: set it to None"
        return None

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        module.__class__ = _on_rows(type(module))
        module.__dict__["_tp_rows"] = (mesh, self.stream, Border(mesh, self.stream))


@cache
def _on_rows(cls: type[nn.Embedding]) -> type[nn.Embedding]:
    """Subclass an embedding class with a forward that works on this rank's rows."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        mesh, stream, border = self._tp_rows
        _check_sequence(input, mesh, stream)
        rows = self.weight.shape[0]
        local_ids = input - _rank(mesh, input.device) * rows
        elsewhere = (local_ids < 0) | (local_ids >= rows)
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
        return border.leave(out)

    namespace = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), namespace)


def _rank(mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """Return this rank's place in `mesh` as a tensor [1], without communication.

    As a tensor, so that it also differs between the ranks that one process simulates.
    """
    places = torch.arange(mesh.size(), device=device)
    return distribute_tensor(places, mesh, [Shard(0)], src_data_rank=None).to_local()


def _check_sequence(tokens: torch.Tensor, mesh: DeviceMesh, stream: Placement) -> None:
    if not isinstance(stream, Shard):
        return
    length = tokens.shape[stream.dim]
    if length % mesh.size():
        raise PlanError(
            f"sequence_parallel: the sequence length {length} (dimension {stream.dim} of the tokens) is not a "
            f"multiple of the tensor-parallel degree {mesh.size()}: pad it, or switch sequence_parallel off"
        )
