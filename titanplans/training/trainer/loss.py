"""The loss of a job: ours, compiled with every option of [compile]; fused with the head where that can be.

The model's router balance loss is added.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchtitan.components import loss as titan

from titanplans.loss import (
    IGNORED,
    DeferredLogits,
    FusedLoss,
    NotFused,
    Objective,
    cross_entropy,
    entropy_and_gradient,
)
from titanplans.parallel.compile import compile_loss

_log = logging.getLogger(__name__)


class CrossEntropyLoss(titan.BaseLoss):
    """A sum over tokens divided by those of the whole batch.

    Attributes:
        added: returns the term that the newest forward adds to the mean over its tokens, or None. Only in training.
        objective: terms added to the cross entropy of a token. Only in training.
    """

    added: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)

    @dataclass(kw_only=True, slots=True)
    class Config(titan.BaseLoss.Config):
        """What [loss] says, whose `build` makes this class."""

        fused: bool | None = None
        chunk_tokens: int = 512
        label_smoothing: float = 0.0
        z_loss: float = 0.0

    def __init__(self, config: Config, *, compile_config: Any = None):
        self.config, self.objective = config, Objective(config.label_smoothing, config.z_loss)
        compiled = (
            compile_config is not None and compile_config.enable and "loss" in compile_config.components
        )
        self._compile = partial(compile_loss, compile_config=compile_config) if compiled else lambda fn: fn
        self.fn = self._compile(_of_logits)

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of logits `pred` [B, L, V], nats per token of the whole batch, and no metrics.

        With context parallelism it is this rank's part: of its own tokens, labels are given for all.
        Without the tokens of the whole batch, in validation, it is a sum, of the cross entropy alone.
        """
        training = global_valid_tokens is not None
        objective = self.objective if training else Objective()
        function = _of_logits if isinstance(pred, DeferredLogits) else self.fn
        loss = function(pred, labels, *objective)
        if training:
            loss = loss / global_valid_tokens
            if (added := self.added()) is not None:
                loss = loss + added * ((labels != IGNORED).sum() / global_valid_tokens)
        return loss, {}

    def fuse(self, model: torch.nn.Module, *, splits_backward: bool = False) -> FusedLoss | None:
        """Return what computes the loss in the head of `model`; None where the job leaves it open, and it can't be.

        Raises:
            NotFused: it was asked for, and can't be.
        """
        if self.config.fused is False:
            return None
        try:
            if splits_backward:
                raise NotFused(
                    "the pipeline's schedule runs its backward twice, and its gradients are kept for one"
                )
            compute = self._compile(entropy_and_gradient)
            return FusedLoss(model, chunk_tokens=self.config.chunk_tokens, compute=compute)
        except NotFused as error:
            self.on_fusion_failed(error)
            return None

    def on_fusion_failed(self, error: NotFused) -> None:
        """Log that the loss is not fused, and why.

        Raises:
            NotFused: it was asked for.
        """
        if self.config.fused:
            raise error
        _log.info(f"the loss is computed from logits, not in the head (loss.fused is unset): {error.reason}")


def _of_logits(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float, z_loss: float
) -> torch.Tensor:
    # Of sequences packed into one row the logits are [1, B * L, V].
    labels = labels if isinstance(logits, DeferredLogits) else labels.reshape(logits.shape[:-1])
    return cross_entropy(logits, labels, 1, label_smoothing=label_smoothing, z_loss=z_loss)
