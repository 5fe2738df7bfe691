"""After each step's backward: biases that keep experts equally busy are moved, and it is known how busy they were."""

from typing import Any

import torch
from torch import nn

from titanplans.split.experts.loads import Loads

PUBLISHED = 1e-3
"""DeepSeek-V3's, and torchtitan's."""


class Experts:
    """How busy the experts of `model` are, evened out step by step.

    Args:
        model: parallelised, with values.
        dims: torchtitan's ParallelDims.
        coefficient: by which biases move; None: `PUBLISHED`.
    """

    def __init__(self, model: nn.Module, dims: Any, coefficient: float | None):
        self.loads = Loads(model)
        self._coefficient = PUBLISHED if coefficient is None else coefficient
        self._groups = []
        for name in ("batch", "cp"):
            if (mesh := dims.get_optional_mesh(name)) is not None and mesh.size() > 1:
                self._groups.append(mesh.get_group())
        self.newest: torch.Tensor | None = None
        """The rows of each expert [mixtures, experts] in the newest step, over all ranks."""

    def after_backward(self, *, skipped: bool) -> None:
        """Move the biases, unless the step was `skipped`. Collective."""
        if not self.loads.mixtures:
            return
        self.newest = self.loads.take(self._groups)
        if self.newest is not None and not skipped and self._coefficient:
            self.loads.move_biases(self.newest, self._coefficient)

    def figures(self) -> dict[str, float]:
        """Return how busy experts were in the newest step, and the largest bias."""
        if self.newest is None:
            return {}
        busiest = self.newest.amax(1) / self.newest.mean(1).clamp_min(1)
        found = {
            "experts/busiest_to_mean": busiest.amax().item(),
            "experts/idle": float((self.newest == 0).sum().item()),
        }
        biases = [mixture.bias for mixture in self.loads.mixtures if mixture.bias is not None]
        if biases:
            found["experts/largest_bias"] = max(bias.detach().abs().max().item() for bias in biases)
        return found

    def picture(self) -> torch.Tensor | None:
        """Return the newest loads as an image [1, mixtures, experts]: black is none, white the busiest of a mixture."""
        if self.newest is None:
            return None
        return (self.newest / self.newest.amax(1, keepdim=True).clamp_min(1))[None].cpu()
