"""Autocast for a model's forward. Parameters keep their dtype."""

import torch
from torch import nn


def apply_autocast(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run the forward of `model` under `torch.autocast`, in place. Each backward uses the dtype of its forward.

    Recomputation under activation checkpointing uses the same dtypes. The model normally returns logits of `dtype`: cast
    them to float32 before a loss that is computed outside of the model.

    Args:
        model: the model, before `torch.compile` is applied to it.
        device_type: "cpu", "cuda", …
        dtype: dtype of matrix products; reductions and norms stay in float32.
    """
    model.forward = torch.autocast(device_type, dtype)(model.forward)  # pyrefly: ignore[bad-assignment]
