"""One training step as a trainer takes it, of a whole model or of a split one: the same functions for both."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from titanplans.proof.modes import Widen

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


def backward(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of `logits` [..., vocabulary], a scalar, after its backward.

    Of logits that are sharded over the vocabulary by torch's `loss_parallel`: three all-reduces of
    one number a token.
    """
    sharded = isinstance(logits, DTensor) and any(p.is_shard(logits.ndim - 1) for p in logits.placements)
    if isinstance(logits, DTensor) and not sharded:
        logits = logits.full_tensor()
    with _sharded_loss(sharded):
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
    return loss.detach()


@contextmanager
def _sharded_loss(sharded: bool) -> Iterator[None]:
    if not sharded:
        yield
        return
    # torch's context manager has no try/finally: an exception that passes through it leaves its
    # operators on, for every cross entropy to come. So it is never told of one.
    context = loss_parallel()
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


def reduce_gradients(model: nn.Module) -> None:
    """Lay each gradient out as its parameter: a Partial one, of a replicated parameter, is summed.

    So does FSDP2 before it shards them. AdamW alone would sum a Partial gradient too, three times
    over: once where it enters the first moment, and twice where it is squared into the second.
    """
    for param in model.parameters():
        if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
            param.grad = param.grad.redistribute(placements=param.placements)


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Return the 2-norm of all gradients, as torchtitan's clipping computes it; a plain scalar."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def adamw_step(model: nn.Module) -> torch.optim.AdamW:
    """Take one step of AdamW with torch's defaults; return the optimizer."""
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    optimizer.step()
    return optimizer


def first_line(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"
