"""The steps that `parallelize` applied to a model, in order; for the parallelism report."""

from typing import Any

from torch import nn

_STEPS = "_steps_taken"


def took(model: nn.Module, step: str, **facts: Any) -> None:
    """Note that `model` has been through `step`; facts are what can't be read off the model later, plain values."""
    model.__dict__.setdefault(_STEPS, []).append({"step": step, **facts})


def steps_taken(model: nn.Module) -> list[dict[str, Any]]:
    """Return what `took` noted, in order."""
    return [dict(step) for step in model.__dict__.get(_STEPS, [])]
