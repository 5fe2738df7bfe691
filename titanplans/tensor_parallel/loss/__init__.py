"""The loss of a language model whose vocabulary may be split: of its logits, or of its hidden states and its head."""

from titanplans.tensor_parallel.loss.balance import added_loss, still_biases
from titanplans.tensor_parallel.loss.cross_entropy import count_tokens, cross_entropy
from titanplans.tensor_parallel.loss.head import FusedLoss, NotFused
from titanplans.tensor_parallel.loss.shares import IGNORED, Objective, entropy_and_gradient
from titanplans.tensor_parallel.loss.stand_in import StandIn

__all__ = [
    "IGNORED",
    "FusedLoss",
    "NotFused",
    "Objective",
    "StandIn",
    "added_loss",
    "count_tokens",
    "cross_entropy",
    "entropy_and_gradient",
    "still_biases",
]
