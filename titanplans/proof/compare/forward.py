"""One forward of an unsplit or split model, its loss, and the origin of an error in it. Start at `call`."""

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
"""Errors that a model raises if it does not run here or is split wrongly: a missing driver, shapes that don't match, a
missing parameter, ranks that diverge."""

Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Takes logits [..., vocabulary] (a DTensor if they are sharded), labels [...] and a number of tokens. Returns the sum of
the losses of all tokens divided by that number, as a plain scalar."""


def call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the output of `model`, without a cache unless `inputs` ask for one. A float64 model is `widened`."""
    with widened(next(model.parameters()).dtype):
        return model(**without_cache(model) | inputs)


def evaluate(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the output of `model` in evaluation mode and without gradients, and set it to training mode again."""
    # Leave out the routers' loss: transformers applies the attention mask to the router logits of this forward. With a
    # cache the mask also covers earlier tokens, so the shapes would not match.
    if "output_router_logits" in inspect.signature(model.forward).parameters:
        inputs = {"output_router_logits": False, **inputs}
    model.eval()
    with torch.no_grad():
        output = call(model, inputs)
    model.train()
    return output


def widened(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context in which the code of a float64 model gets float64 where it asks for float32. No effect for other
    dtypes."""
    return Widen(dtype) if dtype == torch.float64 else nullcontext()


def continued(model: nn.Module, inputs: Mapping[str, Any], output: Any) -> dict[str, Any] | None:
    """Return `inputs` with the cache of an earlier `output` of `model`; None if it holds no cache."""
    cache, name = cache_of(output), cache_argument(model)
    return None if cache is None or name is None else {**inputs, name: cache, "use_cache": True}


def loss_of(
    logits: torch.Tensor, labels: torch.Tensor, tokens: int, loss: Loss = cross_entropy
) -> torch.Tensor:
    """Return the loss of `logits` [..., vocabulary], summed and divided by `tokens`, a plain scalar.

    For float64 logits it is computed in float64, even where the code of the loss asks for float32.
    """
    with widened(logits.dtype):
        return loss(logits, labels, tokens)


def backward(
    logits: torch.Tensor, labels: torch.Tensor, tokens: int, loss: Loss = cross_entropy
) -> torch.Tensor:
    """Run the backward of the loss, and return the loss as `loss_of` does, detached."""
    value = loss_of(logits, labels, tokens, loss)
    value.backward()
    return value.detach()


def at_logits(
    logits: torch.Tensor, labels: torch.Tensor, tokens: int, loss: Loss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of `logits`, and its gradient with respect to the logits, with the placements of the logits."""
    leaf = logits.detach().requires_grad_()
    value = backward(leaf, labels, tokens, loss)
    assert leaf.grad is not None
    return value, leaf.grad


def _modules(error: Exception) -> list[tuple[str, int]]:
    """Return the Python module and line of each frame in the traceback of `error`, outermost first.

    Frames of torch and of the proof are left out, since they are in every traceback.
    """
    frames = [
        (frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return [
        (name, line)
        for name, line in frames
        if name.partition(".")[0] != "torch" and not name.startswith("titanplans.proof.")
    ]


def is_ours(error: Exception) -> bool:
    """Whether code of this project, such as a CPU kernel, is in the traceback of `error`."""
    return any(name.startswith("titanplans.") for name, _ in _modules(error))


def raised_at(error: Exception) -> str:
    """Return the Python module and line that raised `error`, or that called torch, if torch did."""
    name, line = (_modules(error) or [("torch", 0)])[-1]
    return f"{name}:{line}"


def first_line(error: Exception) -> str:
    """Return the type of `error` and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"


def does_not_run(model: nn.Module, error: Exception, place: str) -> PlanError:
    """Return a PlanError about `error`, which the unsplit `model` raised: its source location, and where in the training
    (`place`)."""
    if isinstance(error, ParallelError):  # our own refusal of the model; its message needs nothing added
        return PlanError(str(error))
    device = next(model.parameters()).device.type
    failed = f"{type(model).__name__}, unsplit, does not run on {device}: {first_line(error)} ({raised_at(error)}, {place})"
    if isinstance(error, UserError):
        return PlanError(failed)
    return PlanError(
        f"{failed}; if its kernels need a GPU, prove it there (--device cuda, or a model_fn that makes it on the GPU)"
    )
