"""The names of the argument and of the output with which a forward takes and returns a cache."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

# transformers 5.24 uses `cache` everywhere; earlier releases use `past_key_values`, and `cache_params` in Mamba. FLA
# 0.6 and users' code may use the old names with any release of transformers.
CACHES = ("cache", "past_key_values", "cache_params")


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the argument with which the forward of `model` takes a cache; None if it takes none of `CACHES`."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHES if name in parameters), None)


def cache_of(output: Any) -> Any:
    """Return the cache in the `output` of a model; None if it has none of `CACHES`."""
    if isinstance(output, Mapping) and not hasattr(output, "logits"):
        return next((output[name] for name in CACHES if name in output), None)
    # The newest name first: transformers' outputs have all three, and warn about the old ones.
    return next((getattr(output, name) for name in CACHES if hasattr(output, name)), None)
