"""Load balancing of experts without an auxiliary loss: after a step's backward, move the routers' biases."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.split.experts.loads import Loads
from titanplans.split.objects import gather_objects

_COUNTS = ("experts/idle", "experts/dropped")

PUBLISHED = 1e-3
"""The coefficient of DeepSeek-V3, and of torchtitan."""


class LoadBalancer:
    """The loads of the experts of `model`, balanced step by step.

    Args:
        model: parallelised, with values.
        dims: a `Mesh`, or torchtitan's ParallelDims.
        coefficient: by which a step moves a bias; None: `PUBLISHED`.
        stages: the ranks that hold the other stages of a pipeline, if `model` is one.
    """

    def __init__(
        self, model: nn.Module, dims: Any, coefficient: float | None, stages: dist.ProcessGroup | None = None
    ):
        self.loads, self._stages = Loads(model), stages
        self._coefficient = PUBLISHED if coefficient is None else coefficient
        meshes = [dims.get_optional_mesh(name) for name in ("batch", "cp", "tp")]
        # Ranks of tensor parallelism have the same rows, and send a share of them each.
        self._groups = [mesh.get_group() for mesh in meshes[:2] if mesh is not None and mesh.size() > 1]
        self._senders = [mesh.get_group() for mesh in meshes if mesh is not None and mesh.size() > 1]
        self.newest: torch.Tensor | None = None
        """Rows routed to each expert [mixtures, experts] in the newest step, over all ranks."""
        self.dropped: torch.Tensor | None = None
        """How many of these were left out; None without a capacity."""

    def after_backward(self, *, skipped: bool) -> None:
        """Move the biases, unless the step was `skipped`. Collective."""
        if not self.loads.mixtures:
            return
        self.newest = self.loads.take(self._groups)
        self.dropped = None if self.newest is None else self.loads.take_dropped(self._senders)
        if self.newest is not None and not skipped and self._coefficient:
            self.loads.move_biases(self.newest, self._coefficient)

    def figures(self) -> dict[str, float]:
        """Return metrics of the newest loads, and the largest bias, of all stages. Collective over these."""
        found = [self._figures()]
        if self._stages is not None:
            found = gather_objects(found[0], self._stages)
        return {
            name: (sum if name in _COUNTS else max)(one[name] for one in found if name in one)
            for name in dict.fromkeys(name for one in found for name in one)
        }

    def _figures(self) -> dict[str, float]:
        if self.newest is None:
            return {}
        busiest = self.newest.amax(1) / self.newest.mean(1).clamp_min(1)
        found = {
            "experts/busiest_to_mean": busiest.amax().item(),
            "experts/idle": float((self.newest == 0).sum().item()),
        }
        if self.dropped is not None:
            found["experts/dropped"] = float(self.dropped.item())
        biases = [mixture.bias for mixture in self.loads.mixtures if mixture.bias is not None]
        if biases:
            found["experts/largest_bias"] = max(bias.detach().abs().max().item() for bias in biases)
        return found

    def picture(self) -> torch.Tensor | None:
        """Return the newest loads as an image [1, mixtures, experts]: black is 0, white the largest of a mixture."""
        if self.newest is None:
            return None
        return (self.newest / self.newest.amax(1, keepdim=True).clamp_min(1))[None].cpu()
