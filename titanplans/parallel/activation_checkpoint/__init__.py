"""Activation checkpointing: what is recomputed in the backward, one policy a model.

`policies` has the modes that recompute whole modules, and how a policy is applied; `selective` the one that keeps the
outputs of some operators; `keep_mixer` the one that keeps a whole module. All of them are torch's own recomputation.
"""

from titanplans.parallel.activation_checkpoint.keep_mixer import KeepMixer, Kept
from titanplans.parallel.activation_checkpoint.policies import (
    EveryNthLayer,
    Full,
    MemoryBudget,
    MLPOnly,
    Policy,
    apply_activation_checkpointing,
    is_recomputed,
    memory_budget,
)
from titanplans.parallel.activation_checkpoint.selective import Matmuls, Selective

__all__ = [
    "EveryNthLayer",
    "Full",
    "KeepMixer",
    "Kept",
    "MLPOnly",
    "Matmuls",
    "MemoryBudget",
    "Policy",
    "Selective",
    "apply_activation_checkpointing",
    "is_recomputed",
    "memory_budget",
]
