"""Activation checkpointing with torch's checkpoint wrapper, by the options of `ActivationCheckpoint`.

`apply` finds and wraps modules; `operators` keeps outputs of some operators of a recomputed block; `keep_mixer` keeps the
activations of the token mixer in a recomputed block.
"""

from titanplans.parallel.activation_checkpoint.apply import (
    apply_activation_checkpointing,
    check_activation_checkpointing,
    is_recomputed,
    memory_budget,
)
from titanplans.parallel.activation_checkpoint.keep_mixer import Kept

__all__ = [
    "Kept",
    "apply_activation_checkpointing",
    "check_activation_checkpointing",
    "is_recomputed",
    "memory_budget",
]
