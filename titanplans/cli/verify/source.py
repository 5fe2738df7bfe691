"""Where a model comes from: a config, or a function of the user's own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from titanplans import modeling


@dataclass(frozen=True)
class Source:
    """A model that can be built."""

    words: str
    """What was asked for, for the header."""

    config: PretrainedConfig | None = None
    """None: `make` returns the model."""

    make: Callable[[], nn.Module] | None = None


def build(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the model of `config` with weights, on `device`. The proof draws new parameters: no noise is added here."""
    model: nn.Module = modeling.build_real(config, dtype=dtype, noise=0.0)
    return model.to(device)
