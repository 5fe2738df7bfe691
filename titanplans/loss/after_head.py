"""Elementwise functions that models apply to logits after the head, by config: the fused loss applies them itself.

`DeferredLogits.check` compares them with the model's code at each forward, and refuses a model that does something else.
"""

from functools import partial
from typing import Any

import torch

from titanplans.loss.fused import Elementwise


def after_head(config: Any) -> Elementwise | None:
    """Return what a model with this config applies to its logits after the head; None: nothing."""
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
