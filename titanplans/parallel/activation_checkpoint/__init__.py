"""Activation checkpointing: which activations are recomputed in the backward, by an `ActivationCheckpoint` of the options.

`apply` finds the modules and wraps them; `operators` keeps the outputs of some operators of a recomputed block;
`keep_mixer` keeps a whole module. All of it is torch's own recomputation.
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
