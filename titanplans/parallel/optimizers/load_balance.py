"""Load balancing of experts without an auxiliary loss: routers' biases are adjusted after each step's backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.split.experts.loads import Loads
from titanplans.split.objects import gather_objects

_COUNTS = ("experts/idle", "experts/dropped")

DEEPSEEK_V3_STEP_SIZE = 1e-3
"""The coefficient of DeepSeek-V3, which is also torchtitan's default."""


class LoadBalancer:
    """Count the tokens of each expert of `model`, and balance them with the routers' biases.

    Args:
        model: parallelised and materialised.
        dims: a `Mesh`, or torchtitan's ParallelDims.
        coefficient: the change of a bias in one step; None: `DEEPSEEK_V3_STEP_SIZE`. 0: count only.
        stages: the group of the pipeline's ranks, if `model` is a stage.
    """

    def __init__(
        self, model: nn.Module, dims: Any, coefficient: float | None, stages: dist.ProcessGroup | None = None
    ):
        self.loads, self._stages = Loads(model), stages
        self._coefficient = DEEPSEEK_V3_STEP_SIZE if coefficient is None else coefficient
        meshes = [dims.get_optional_mesh(name) for name in ("batch", "cp", "tp")]
        # All tensor-parallel ranks count the same tokens, but each of these ranks sends, and may drop, only some of them.
        self._groups = [mesh.get_group() for mesh in meshes[:2] if mesh is not None and mesh.size() > 1]
        self._senders = [mesh.get_group() for mesh in meshes if mesh is not None and mesh.size() > 1]
        self.token_counts: torch.Tensor | None = None
        """Tokens routed to each expert in the latest step, over all ranks: [mixtures, experts]."""
        self.dropped: torch.Tensor | None = None
        """Number of these tokens that were dropped; None without a capacity."""

    def after_backward(self, *, skipped: bool) -> None:
        """Take the counts of the step, and adjust the biases unless the step is `skipped`. Collective."""
        if not self.loads.mixtures:
            return
        self.token_counts = self.loads.take(self._groups)
        self.dropped = None if self.token_counts is None else self.loads.take_dropped(self._senders)
        if self.token_counts is not None and not skipped and self._coefficient:
            self.loads.move_biases(self.token_counts, self._coefficient)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the latest loads and the largest bias, over all stages. Collective over the stages."""
        by_stage = [self._stage_metrics()]
        if self._stages is not None:
            by_stage = gather_objects(by_stage[0], self._stages)
        return {
            name: (sum if name in _COUNTS else max)(metrics[name] for metrics in by_stage if name in metrics)
            for name in dict.fromkeys(name for metrics in by_stage for name in metrics)
        }

    def _stage_metrics(self) -> dict[str, float]:
        if self.token_counts is None:
            return {}
        busiest = self.token_counts.amax(1) / self.token_counts.mean(1).clamp_min(1)
        metrics = {
            "experts/busiest_to_mean": busiest.amax().item(),
            "experts/idle": float((self.token_counts == 0).sum().item()),
        }
        if self.dropped is not None:
            metrics["experts/dropped"] = float(self.dropped.item())
        biases = [mixture.bias for mixture in self.loads.mixtures if mixture.bias is not None]
        if biases:
            metrics["experts/largest_bias"] = max(bias.detach().abs().max().item() for bias in biases)
        return metrics

    def picture(self) -> torch.Tensor | None:
        """Return the latest loads as an image [1, mixtures, experts]: black is 0, white is the mixture's largest load."""
        if self.token_counts is None:
            return None
        return (self.token_counts / self.token_counts.amax(1, keepdim=True).clamp_min(1))[None].cpu()
