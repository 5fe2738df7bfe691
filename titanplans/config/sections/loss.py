"""The training objective: [loss]."""

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import FractionBelowOne, NaturalFloat, PositiveInt


class Loss(Options, section="loss", refuses=groups.loss):
    """The cross entropy of the next token, and how it is computed."""

    fused: bool | None = None
    """Compute it in the head, a chunk of tokens at a time, so that the logits of a chunk alone exist; unset: unless the head
    is no plain Linear (float8, adapters), or the model does more with its logits than its config says."""

    chunk_tokens: PositiveInt = 512
    """Tokens of a chunk of the fused loss."""

    label_smoothing: FractionBelowOne = 0.0
    """In training: the share of each label that all tokens of the vocabulary have alike."""

    z_loss: NaturalFloat = 0.0
    """In training: weight of the squared logarithm of the sum of exponentials, which is added; PaLM has 1e-4."""
