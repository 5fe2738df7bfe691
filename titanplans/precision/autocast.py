"""torch.autocast around a model's forward: operators choose their dtype, parameters keep theirs."""

import torch
from torch import nn


def apply_autocast(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run the forward of `model` under autocast, in place; the backward takes each operator's dtype from it.

    Recomputation under activation checkpointing sees the same dtypes. A loss computed outside sees what
    the model returns, normally logits of `dtype`: cast them to float32 first.

    Args:
        model: the model, before it is compiled as a whole.
        device_type: "cpu", "cuda", …
        dtype: dtype of matrix products; reductions and norms stay in float32.
    """
    model.forward = torch.autocast(device_type, dtype)(model.forward)  # pyrefly: ignore[bad-assignment]
