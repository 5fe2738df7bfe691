"""torchtitan's cross entropy, compiled with every option of [compile]; torchtitan itself passes the backend alone.

To it comes what the model adds: the balance of its routers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components import loss as titan

from titanplans.parallel.compile import compile_loss
from titanplans.tensor_parallel.loss import IGNORED


class CrossEntropyLoss(titan.CrossEntropyLoss):
    """torchtitan's, a sum over tokens divided by those of the whole batch.

    Attributes:
        added: returns what the newest forward adds to the mean over its tokens, or None. In training, not in validation.
    """

    added: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CrossEntropyLoss.Config):
        """torchtitan's, whose `build` makes this class."""

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of logits `pred` [B, L, V], nats per token of the whole batch, and no metrics."""
        loss, metrics = super().__call__(pred, labels, global_valid_tokens, **kwargs)
        if global_valid_tokens is not None and (added := self.added()) is not None:
            loss = loss + added * ((labels != IGNORED).sum() / global_valid_tokens)
        return loss, metrics

    def _maybe_compile(self, compile_config: Any) -> None:
        """Compile as `compile_config` says, a `parallel.Compile`."""
        if compile_config.enable and "loss" in compile_config.components:
            self.fn = compile_loss(self.fn, compile_config)
