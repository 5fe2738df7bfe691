"""One training step of a whole model or of a split one: the same functions for both.

The loss is that of training (`titanplans.tensor_parallel`).
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from titanplans.proof.modes import Widen
from titanplans.tensor_parallel.loss import cross_entropy

FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What a model raises that does not run here, or is split wrongly: no driver, shapes that don't match, a parameter
that is not there, ranks that differ."""


def forward(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the logits [..., vocabulary]; a DTensor, `Shard(-1)`, under loss parallelism.

    Where the model's own code asks for float32, it is given the dtype of its parameters.
    """
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs = {"use_cache": False, **inputs}  # no generation here, and a cache costs
    with Widen(next(model.parameters()).dtype):
        output = model(**inputs)
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    return output["logits"] if isinstance(output, Mapping) else output[0]


Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Of logits [..., vocabulary], a DTensor where they are sharded, and labels [...]: the sum over tokens, divided by
how many there are; a plain scalar."""


def backward(logits: torch.Tensor, labels: torch.Tensor, loss: Loss = cross_entropy) -> torch.Tensor:
    """Return the mean loss of `logits` [..., vocabulary], a plain scalar, after its backward.

    Where the loss asks for float32, it is given the dtype of the logits.
    """
    with Widen(logits.dtype):
        value = loss(logits, labels, labels.numel())
    value.backward()
    return value.detach()


def at_logits(logits: torch.Tensor, labels: torch.Tensor, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss of `logits` and its gradient with respect to them, laid out as they are."""
    leaf = logits.detach().requires_grad_()
    value = backward(leaf, labels, loss)
    assert leaf.grad is not None
    return value, leaf.grad


def adamw_step(model: nn.Module) -> torch.optim.AdamW:
    """Take one step of AdamW, fused as torchtitan's, with torch's defaults; return the optimizer."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)
    optimizer.step()
    return optimizer


def first_line(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"
