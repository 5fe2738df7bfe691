"""One forward of a model, whole or split, its logits and its loss; and whether its own code raised an error, or ours."""

import inspect
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from titanplans.errors import ParallelError, PlanError, UserError
from titanplans.kernels.widen import Widen
from titanplans.loss import cross_entropy
from titanplans.split.cache import cache_argument, cache_of
from titanplans.split.stages.trace import without_cache

FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""Errors of a model that does not run here, or is split wrongly: no driver, shapes that don't match, a missing
parameter, ranks that differ."""

Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Of logits [..., vocabulary], a DTensor if they are sharded, and labels [...]: the sum over tokens, divided by
their number; a plain scalar."""


def call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the output of `model`, without a cache unless `inputs` ask for one.

    Where the code of a float64 model asks for float32, it gets float64.
    """
    with widened(next(model.parameters()).dtype):
        return model(**without_cache(model) | inputs)


def evaluate(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the output of `model`, which is in training mode, in evaluation mode, without a gradient.

    Routers are balanced in training alone: transformers computes their loss by the attention mask of this forward's
    tokens, and with a cache the mask covers earlier tokens, too.
    """
    if "output_router_logits" in inspect.signature(model.forward).parameters:
        inputs = {"output_router_logits": False, **inputs}
    model.eval()
    with torch.no_grad():
        output = call(model, inputs)
    model.train()
    return output


def widened(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the context in which a float64 model computes in float64 where its code asks for float32."""
    return Widen(dtype) if dtype == torch.float64 else nullcontext()


def continued(model: nn.Module, inputs: Mapping[str, Any], output: Any) -> dict[str, Any] | None:
    """Return `inputs` that go on from the cache in `output`, what `model` returned before; None if it holds no cache."""
    cache, name = cache_of(output), cache_argument(model)
    return None if cache is None or name is None else {**inputs, name: cache, "use_cache": True}


def loss_of(
    logits: torch.Tensor, labels: torch.Tensor, tokens: int, loss: Loss = cross_entropy
) -> torch.Tensor:
    """Return the loss of `logits` [..., vocabulary], summed and divided by `tokens`, a plain scalar.

    Where the loss of float64 logits asks for float32, it gets float64.
    """
    with widened(logits.dtype):
        return loss(logits, labels, tokens)


def backward(
    logits: torch.Tensor, labels: torch.Tensor, tokens: int, loss: Loss = cross_entropy
) -> torch.Tensor:
    """Return the loss as `loss_of` does, after its backward."""
    value = loss_of(logits, labels, tokens, loss)
    value.backward()
    return value.detach()


def at_logits(
    logits: torch.Tensor, labels: torch.Tensor, tokens: int, loss: Loss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of `logits` and its gradient with respect to them, in their layout."""
    leaf = logits.detach().requires_grad_()
    value = backward(leaf, labels, tokens, loss)
    assert leaf.grad is not None
    return value, leaf.grad


def _modules(error: Exception) -> list[tuple[str, int]]:
    """Return the Python modules through which `error` came, the outermost first, each with its line.

    Torch and the proof, which surround every call, are left out.
    """
    found = [
        (frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return [
        (name, line)
        for name, line in found
        if name.partition(".")[0] != "torch" and not name.startswith("titanplans.proof.")
    ]


def is_ours(error: Exception) -> bool:
    """Whether `error` came through code of this project, such as a CPU kernel."""
    return any(name.startswith("titanplans.") for name, _ in _modules(error))


def raised_at(error: Exception) -> str:
    """Return the Python module and line that raised `error`, or that called torch, if torch did."""
    name, line = (_modules(error) or [("torch", 0)])[-1]
    return f"{name}:{line}"


def first_line(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"


def does_not_run(model: nn.Module, error: Exception, place: str) -> PlanError:
    """Return the error that reports the `error` of the whole `model`, its line, and the `place` in the training.

    A `ParallelError`, a refusal of the model as it was built, says all of that.
    """
    if isinstance(error, ParallelError):
        return PlanError(str(error))
    device = next(model.parameters()).device.type
    failed = f"{type(model).__name__}, unsplit, does not run on {device}: {first_line(error)} ({raised_at(error)}, {place})"
    if isinstance(error, UserError):
        return PlanError(failed)
    return PlanError(
        f"{failed}; if its kernels need a GPU, prove it there (--device cuda, or a model_fn that makes it on the GPU)"
    )
