"""How the weights change: [optimizer] with [[optimizer.groups]], and [lr_scheduler]."""

import re
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import (
    Constraint,
    Fraction,
    FractionBelowOne,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
)


def _compiles(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern).pattern)
    except re.error:
        return False


Pattern = Annotated[str, Constraint("a regular expression", _compiles)]
NewtonSchulzSteps = Annotated[int, Ge(1), Lt(100)]
ScaleRule = Literal["match_rms_adamw", "original"]


class OptimizerGroup(Options, section="optimizer.groups", refuses=groups.optimizer_group):
    """Settings of the parameters whose names match a pattern. A key that is unset has the value of the same key in
    [optimizer]."""

    pattern: Pattern = ""
    """Regular expression that is searched in the names of trainable parameters, as they are in the state dict. A
    parameter belongs to the first group whose pattern matches its name."""

    name: Literal["Adam", "AdamW", "Muon"] | None = None
    """Optimizer."""

    lr: PositiveFloat | None = None
    """Learning rate after the warm-up."""

    beta1: FractionBelowOne | None = None
    """For Adam and AdamW: decay of the first moment."""

    beta2: FractionBelowOne | None = None
    """For Adam and AdamW: decay of the second moment."""

    eps: NaturalFloat | None = None
    """For Adam and AdamW: added to the denominator of the update."""

    weight_decay: NaturalFloat | None = None
    """Weight decay of every parameter of the group, norms and biases included."""

    momentum: FractionBelowOne | None = None
    """For Muon: decay of the momentum."""

    nesterov: bool | None = None
    """For Muon: Nesterov's momentum."""

    ns_steps: NewtonSchulzSteps | None = None
    """For Muon: steps of the Newton-Schulz iteration."""

    adjust_lr_fn: ScaleRule | None = None
    """For Muon: how the update is scaled according to the shape of the matrix."""


class Optimizer(Options, section="optimizer", refuses=groups.optimizer):
    """How parameters are updated; groups of parameters may have other settings."""

    name: Literal["Adam", "AdamW", "Muon"] = "AdamW"
    """Optimizer. Muon updates the matrices of hidden layers, and AdamW the embedding, head, norms, biases and
    convolutions."""

    lr: PositiveFloat = 8e-4
    """Learning rate after the warm-up."""

    beta1: FractionBelowOne = 0.9
    """For Adam and AdamW: decay of the first moment."""

    beta2: FractionBelowOne = 0.95
    """For Adam and AdamW: decay of the second moment."""

    eps: NaturalFloat = 1e-8
    """For Adam and AdamW: added to the denominator of the update."""

    weight_decay: NaturalFloat = 0.1
    """Weight decay. Vectors, norms and parameters that a model marks `_no_weight_decay` have none, unless decay_all is
    set."""

    decay_all: bool = False
    """Apply weight_decay to every parameter, including norms, biases and marked parameters."""

    momentum: FractionBelowOne = 0.95
    """For Muon: decay of the momentum."""

    nesterov: bool = True
    """For Muon: Nesterov's momentum."""

    ns_steps: NewtonSchulzSteps = 5
    """For Muon: steps of the Newton-Schulz iteration."""

    adjust_lr_fn: ScaleRule = "match_rms_adamw"
    """For Muon: factor of the update of a matrix [A, B]: 0.2 sqrt(max(A, B)), which suits AdamW's learning rates
    (Moonlight, "match_rms_adamw"), or sqrt(max(1, A / B)) (Keller Jordan, "original")."""

    load_balance_coeff: NaturalFloat | None = None
    """Step size of the router biases that keep experts equally busy (DeepSeek-V3, GLM-4.5); unset: 0.001, if a router
    has such biases. 0: the biases are not changed."""

    implementation: Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"] = "fused"
    """For Adam and AdamW: one kernel for all parameters ("fused"), several for all parameters ("foreach"), or several for
    each parameter ("for-loop"); "fused_opt_states_bf16" is "fused" with moments in bfloat16 (CUDA)."""

    groups: tuple[OptimizerGroup, ...] = ()
    """Groups of parameters with other settings: tables [[optimizer.groups]] with the keys below."""


class LRScheduler(Options, section="lr_scheduler"):
    """Linear warm-up, then constant, then decay. A run shorter than the warm-up stays in it."""

    warmup_steps: NaturalInt = 200
    """Steps over which the learning rate rises to optimizer.lr."""

    total_steps: PositiveInt | None = None
    """Schedule length in steps, if it differs from training.steps, e.g. so that a short run follows the curve of a longer
    one. Unset: training.steps."""

    decay_ratio: Fraction | None = None
    """Fraction of the schedule, at its end, in which the learning rate decays. 0: it never decays. Unset: it decays from
    the end of the warm-up."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Fraction = 0.0
    """Learning rate at the end of the decay, as a fraction of optimizer.lr."""


class Loss(Options, section="loss", refuses=groups.loss):
    """The cross entropy of the next token, and how it is computed."""

    fused: bool | None = None
    """Compute the loss in the head, chunk by chunk, so that only a chunk of logits exists at a time; unset: true if the head
    is a plain Linear (no float8, no adapters) and the model changes its logits at most by an operation that its config
    names, such as a soft cap."""

    chunk_tokens: PositiveInt = 512
    """Tokens in a chunk of the fused loss."""

    label_smoothing: FractionBelowOne = 0.0
    """Label smoothing: probability spread evenly over the vocabulary (training only)."""

    z_loss: NaturalFloat = 0.0
    """Weight of the z-loss (the squared log-sum-exp of the logits), which is added to the loss in training; PaLM uses
    1e-4. 0: none."""
