"""The loss of a job: ours, compiled with every option of [compile]; fused with the head where that can be.

The model's router balance loss is added.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from titanplans.config.sections.optimization import Loss
from titanplans.loss import (
    IGNORED,
    DeferredLogits,
    FusedLoss,
    NotFused,
    Objective,
    cross_entropy,
    entropy_and_gradient,
)
from titanplans.parallel import Compile
from titanplans.parallel.compile import compile_loss

_log = logging.getLogger(__name__)


class CrossEntropyLoss:
    """A sum over tokens divided by those of the whole batch.

    Args:
        options: [loss].
        compiled: which components of the job are compiled; None: none.

    Attributes:
        added: returns the term that the newest forward adds to the mean over its tokens, or None. Only in training.
        objective: terms added to the cross entropy of a token. Only in training.
    """

    added: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)

    def __init__(self, options: Loss, compiled: Compile | None = None):
        self.options, self.objective = options, Objective(options.label_smoothing, options.z_loss)
        self._compile: Callable[[Any], Any] = lambda function: function
        if compiled is not None and compiled.enable and "loss" in compiled.components:
            self._compile = partial(compile_loss, compile_config=compiled)
        self._of_logits = self._compile(_of_logits)

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        all_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of `logits` [B, L, V], a sum over tokens divided by `all_tokens`, those of the whole batch.

        With context parallelism it is this rank's summand: of its own tokens, labels are given for all. Without
        `all_tokens`, in validation, it is a sum over tokens, of the cross entropy alone.
        """
        training = all_tokens is not None
        objective = self.objective if training else Objective()
        function = _of_logits if isinstance(logits, DeferredLogits) else self._of_logits
        loss = function(logits, labels, *objective)
        if training:
            loss = loss / all_tokens
            if (added := self.added()) is not None:
                loss = loss + added * ((labels != IGNORED).sum() / all_tokens)
        return loss

    def fuse(self, model: torch.nn.Module, *, splits_backward: bool = False) -> FusedLoss | None:
        """Return what computes the loss in the head of `model`; None where the job leaves it open, and it can't be.

        Raises:
            NotFused: it was asked for, and can't be.
        """
        if self.options.fused is False:
            return None
        try:
            if splits_backward:
                raise NotFused(
                    "the pipeline's schedule runs its backward twice, and its gradients are kept for one"
                )
            compute = self._compile(entropy_and_gradient)
            return FusedLoss(model, chunk_tokens=self.options.chunk_tokens, compute=compute)
        except NotFused as error:
            self.on_fusion_failed(error)
            return None

    def on_fusion_failed(self, error: NotFused) -> None:
        """Log that the loss is not fused, and why.

        Raises:
            NotFused: it was asked for.
        """
        if self.options.fused:
            raise error
        _log.info(f"the loss is computed from logits, not in the head (loss.fused is unset): {error.reason}")


def _of_logits(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float, z_loss: float
) -> torch.Tensor:
    # Of sequences packed into one row the logits are [1, B * L, V].
    labels = labels if isinstance(logits, DeferredLogits) else labels.reshape(logits.shape[:-1])
    return cross_entropy(logits, labels, 1, label_smoothing=label_smoothing, z_loss=z_loss)
