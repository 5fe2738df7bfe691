"""A cache of keys and values, or of states: the names by which a forward takes and returns it.

transformers 5.24 says `cache` everywhere. Before, it was `past_key_values`, and `cache_params` in Mamba. FLA 0.6, and code
of a user's own, have the old names under either release.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

CACHES = ("cache", "past_key_values", "cache_params")


def cache_argument(model: nn.Module) -> str | None:
    """Return the argument by which the forward of `model` takes a cache; None for none of `CACHES`."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHES if name in parameters), None)


def cache_of(output: Any) -> Any:
    """Return the cache in the `output` of a model; None for none of `CACHES`."""
    if isinstance(output, Mapping) and not hasattr(output, "logits"):
        return next((output[name] for name in CACHES if name in output), None)
    # The newest name first: transformers' outputs have all three, and warn of the old ones.
    return next((getattr(output, name) for name in CACHES if hasattr(output, name)), None)
