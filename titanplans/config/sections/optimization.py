"""How the weights change: [optimizer], [lr_scheduler]."""

from typing import ClassVar, Literal

from titanplans.config.options import Options
from titanplans.config.values import (
    Fraction,
    FractionBelowOne,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
)


class Optimizer(Options):
    """Adam or AdamW, the same for every parameter."""

    section: ClassVar[str] = "optimizer"

    name: Literal["Adam", "AdamW"] = "AdamW"
    """Optimizer."""

    lr: PositiveFloat = 8e-4
    """Learning rate after the warm-up."""

    beta1: FractionBelowOne = 0.9
    """Decay of the first moment."""

    beta2: FractionBelowOne = 0.95
    """Decay of the second moment."""

    eps: NaturalFloat = 1e-8
    """Added to the denominator of the update."""

    weight_decay: NaturalFloat = 0.1
    """Weight decay of every parameter."""

    implementation: Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"] = "fused"
    """One kernel, a few, or one a parameter; fused_opt_states_bf16 keeps the moments in bfloat16 (CUDA)."""


class LRScheduler(Options):
    """Linear warm-up, then constant, then decay. A run shorter than the warm-up stays in it."""

    section: ClassVar[str] = "lr_scheduler"

    warmup_steps: NaturalInt = 200
    """Steps over which the learning rate rises to optimizer.lr."""

    total_steps: PositiveInt | None = None
    """Length of the schedule where it is not that of the run (a run cut short keeps the curve); unset: training.steps."""

    decay_ratio: Fraction | None = None
    """Share of the schedule in which the learning rate decays, at its end; 0: never; unset: all of it after the warm-up."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of optimizer.lr."""
