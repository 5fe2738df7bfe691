"""Parameters and buffers that stay in float32 in a 16-bit model, such as norms, routers and biases of experts.

Classes of transformers list them in `_keep_in_fp32_modules` (for float16) and `_keep_in_fp32_modules_strict` (for float16
and bfloat16), which `from_pretrained` honours. A user's model, or a module in it, may have the same attributes.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.split.decoder import without_wrappers


def keeps_float32(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Return a function that tells whether a parameter or buffer, given by name, stays float32 in a `model` of `dtype`.

    Patterns are matched as in transformers' `from_pretrained`. Names may contain the prefixes that activation checkpointing
    and torch.compile add. The function always returns False if the model declares no patterns or `dtype` is None.
    """
    # A method of transformers' models, which knows the dtypes that each of the two attributes applies to.
    patterns_for: Any = getattr(model, "_get_dtype_plan", partial(_declared_patterns, model))
    patterns = [] if dtype is None else [pattern.replace("*", ".*") for pattern in patterns_for(dtype)]
    if not patterns:
        return lambda name: False
    pattern_of_kept = re.compile("|".join(patterns))
    return lambda name: pattern_of_kept.search(without_wrappers(name)) is not None


def _declared_patterns(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the patterns that a model from outside transformers and its modules declare for `dtype`."""
    strict = "_keep_in_fp32_modules_strict"
    attributes = {torch.float16: ("_keep_in_fp32_modules", strict), torch.bfloat16: (strict,)}.get(dtype, ())
    return [
        pattern
        for module in model.modules()
        for attribute in attributes
        for pattern in getattr(module, attribute, None) or ()
    ]
