"""The loss of a language model whose vocabulary may be sharded: `cross_entropy` of logits, or `FusedLoss` in the head."""

from titanplans.loss.balance import added_loss
from titanplans.loss.cross_entropy import count_tokens, cross_entropy
from titanplans.loss.deferred_logits import DeferredLogits
from titanplans.loss.head import FusedLoss, NotFused
from titanplans.loss.sharded_logits import IGNORED, Objective, entropy_and_gradient

__all__ = [
    "IGNORED",
    "DeferredLogits",
    "FusedLoss",
    "NotFused",
    "Objective",
    "added_loss",
    "count_tokens",
    "cross_entropy",
    "entropy_and_gradient",
]
