"""What a model does to its logits behind its head, by its config: the loss is computed before that code runs.

It is compared with what the code does, at each forward (`stand_in`): a model that does something else is refused.
"""

from functools import partial
from typing import Any

import torch

from titanplans.loss.fused import Elementwise


def after_head(config: Any) -> Elementwise | None:
    """Return what a model with this config does to its logits behind its head; None for nothing."""
    for name, function in _FUNCTIONS.items():
        if (number := getattr(config, name, None)) is not None:
            return partial(function, number=number)
    return None


def _capped(logits: torch.Tensor, number: float) -> torch.Tensor:
    return torch.tanh(logits / number) * number


def _multiplied(logits: torch.Tensor, number: float) -> torch.Tensor:
    return logits * number


def _divided(logits: torch.Tensor, number: float) -> torch.Tensor:
    return logits / number


_FUNCTIONS = {
    "final_logit_softcapping": _capped,  # Gemma 2 and 3
    "logit_scale": _multiplied,  # Cohere
    "logits_scaling": _divided,  # Granite
}
