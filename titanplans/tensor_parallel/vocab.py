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
from torch.distributed.tensor import Shard

from titanplans.tensor_parallel.local_parameters import Layout
from titanplans.tensor_parallel.stream import Border, Stream, shard_size
from titanplans.tensor_parallel.styles import Style


class VocabEmbedding(Style):
    """Shard an embedding's rows; the output is summed over the ranks.

    Args:
        stream: the residual stream.
        begins_stream: the sum is laid out as the stream, which with sequence parallelism saves half of
            its bytes. For models that draw no conclusion (positions, masks, where images belong) from
            the embeddings; otherwise they are whole on every rank, and the stream begins at the first block.
    """

    vocabulary = True

    def __init__(self, *, stream: Stream, begins_stream: bool):
        self.stream, self.begins_stream = stream, begins_stream

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        return {"weight": Layout(Shard(0), Shard(0))}

    def refusal(self, module: nn.Module) -> str | None:
        if getattr(module, "max_norm", None) is not None:
            return f"max_norm = {module.max_norm} renormalises rows in place, which a shard can't: set it to None"
        return None

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        size = shard_size(module._parameters["weight"].shape[0], mesh.size())  # type: ignore[union-attr]
        border = Border(mesh, self.stream if self.begins_stream else Stream(False, 0))
        module.__class__ = _on_rows(type(module))
        module.__dict__["_tp_rows"] = (size, border)


@cache
def _on_rows(cls: type[nn.Embedding]) -> type[nn.Embedding]:
    """Subclass an embedding class with a forward that works on this rank's rows."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        size, border = self._tp_rows
        # By `narrow`, not by arithmetic on the rank: it also differs between ranks that one process simulates.
        firsts = torch.arange(border.group[1], device=input.device) * size
        local_ids = input - firsts.narrow(0, border.rank, 1)
        elsewhere = (local_ids < 0) | (local_ids >= size)
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
        if border.stream.dim is not None:
            border.stream.length = input.shape[border.stream.dim]
        return border.leave(out)

    namespace = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), namespace)
