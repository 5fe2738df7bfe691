"""The loss of a job: cross entropy, fused with the head if possible, plus the model's router balance loss."""

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
    """Cross entropy summed over a rank's tokens and divided by the number of valid tokens of the global batch.

    Args:
        options: the options in [loss].
        compiled: the options in [compile]; the loss is compiled if `components` has "loss". None: it is not compiled.

    Attributes:
        get_balance_loss: returns the router balance loss of the newest forward, or None. It is added only in training.
        objective: label smoothing and z-loss, which change the loss of each token, only in training.
    """

    get_balance_loss: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)

    def __init__(self, options: Loss, compiled: Compile | None = None):
        self.options, self.objective = options, Objective(options.label_smoothing, options.z_loss)
        self._compile: Callable[[Any], Any] = lambda function: function
        if compiled is not None and compiled.enable and "loss" in compiled.components:
            self._compile = partial(compile_loss, compile_config=compiled)
        self._loss_from_logits = self._compile(_loss_from_logits)

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of `logits` [B, L, V], summed over tokens and divided by `global_valid_tokens`.

        Under context parallelism every rank gets the labels of all tokens, but its loss covers only its local tokens: the
        losses of the CP ranks add up to the loss of the batch.

        Args:
            logits: the result of the model's forward; `DeferredLogits` hold a loss that the head has computed.
            labels: [B, L]; `IGNORED` for tokens that do not count.
            global_valid_tokens: in training, the number of labels in the step that count, over all ranks. None
                (validation): return the plain cross entropy, summed over tokens.
        """
        training = global_valid_tokens is not None
        objective = self.objective if training else Objective()
        function = _loss_from_logits if isinstance(logits, DeferredLogits) else self._loss_from_logits
        loss = function(logits, labels, *objective)
        if training:
            loss = loss / global_valid_tokens
            if (balance_loss := self.get_balance_loss()) is not None:
                loss = loss + balance_loss * ((labels != IGNORED).sum() / global_valid_tokens)
        return loss

    def fuse(self, model: torch.nn.Module, *, splits_backward: bool = False) -> FusedLoss | None:
        """Return the loss fused with the head of `model`; None if it can't be fused and loss.fused is not true.

        Raises:
            NotFused: loss.fused = true, but the loss can't be fused.
        """
        if self.options.fused is False:
            return None
        try:
            if splits_backward:
                raise NotFused(
                    "the pipeline's schedule runs the backward in two passes, and the head keeps its gradients for only "
                    "one"
                )
            compute = self._compile(entropy_and_gradient)
            return FusedLoss(model, chunk_tokens=self.options.chunk_tokens, compute=compute)
        except NotFused as error:
            self.on_fusion_failed(error)
            return None

    def on_fusion_failed(self, error: NotFused) -> None:
        """Log why the loss is not fused; with loss.fused = true, raise the error instead."""
        if self.options.fused:
            raise error
        _log.info(f"the loss is computed from logits, not in the head (loss.fused is unset): {error.reason}")


def _loss_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float, z_loss: float
) -> torch.Tensor:
    # With cu_seqlens the sequences are joined into one, so the labels [B, L] are reshaped like the logits [1, B * L, V].
    # With deferred logits the labels keep their shape, since they are compared with the labels that the head got.
    labels = labels if isinstance(logits, DeferredLogits) else labels.reshape(logits.shape[:-1])
    return cross_entropy(logits, labels, 1, label_smoothing=label_smoothing, z_loss=z_loss)
