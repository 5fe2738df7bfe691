"""What a model keeps in float32 where the rest of it has 16 bits: norms, routers, biases of experts.

transformers' classes say it by `_keep_in_fp32_modules` (of float16) and `_keep_in_fp32_modules_strict` (of bfloat16, too),
and `from_pretrained` honours it. Which dtypes they hold for is asked of the model, by transformers' own method. A model of
one's own, or a module in it, says it by the same attributes.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.split.decoder import without_wrappers


def keeps_float32(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Return what says of a parameter's or persistent buffer's name whether it stays in float32 where `model` has `dtype`.

    The patterns are matched as transformers matches them when it loads. Names are those of the module tree, perhaps with
    what checkpointing and compile add to them. Of a model that says nothing, and of None, none stays.
    """
    of: Any = getattr(model, "_get_dtype_plan", partial(_said, model))
    patterns = [] if dtype is None else [each.replace("*", ".*") for each in of(dtype)]
    if not patterns:
        return lambda name: False
    kept = re.compile("|".join(patterns))
    return lambda name: kept.search(without_wrappers(name)) is not None


def _said(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the patterns for `dtype` of a model that is none of transformers', and of its modules."""
    strict = "_keep_in_fp32_modules_strict"
    names = {torch.float16: ("_keep_in_fp32_modules", strict), torch.bfloat16: (strict,)}.get(dtype, ())
    return [
        each for module in model.modules() for name in names for each in getattr(module, name, None) or ()
    ]
