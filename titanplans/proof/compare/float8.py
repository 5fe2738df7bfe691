"""`exact_float8`: float8 products in float64, since torchao's emulation in float32 would hide errors below 1e-7."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.split.converted import float8_linears
from titanplans.torch_private.dispatch import without_torch_function
from titanplans.torch_private.torchao import cast_to_float8, float8_data, float8_scale


@contextmanager
def exact_float8(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Multiply float8 numbers in `dtype` in the body, if `model` was converted to float8; else do nothing.

    A cast to float8 is a step function. If two models differ by the rounding of float64, one cast in 10^14 falls on
    different steps. If they differ by the rounding of float32, some casts do in every run.

    Raises:
        PlanError: `dtype` is not float64, or the products are not emulated, so they can't be computed in float64.
    """
    linears = float8_linears(model)
    if not linears:
        yield
        return
    from torchao.float8 import float8_ops, float8_utils

    name, linear = next(iter(linears.items()))
    if dtype != torch.float64:
        raise PlanError(
            f"{name} is float8, but dtype = {dtype}, whose rounding moves numbers across float8's steps, each by up to "
            "an eighth of the number, so the unsplit and the split model can't be compared: use torch.float64"
        )
    if not linear.config.emulate:
        raise PlanError(
            f"{name} multiplies float8 numbers in a kernel, which rounds to bfloat16 or float32: convert the model with "
            "emulate=True to prove it"
        )
    # Three functions of torchao are replaced while the body runs: the product, the scale and the cast.
    table, mm = float8_ops.FLOAT8_OPS_TABLE, torch.ops.aten.mm.default
    original_mm, original_scale = table[mm], float8_utils.amax_to_scale
    cast_class = cast_to_float8()
    original_cast = cast_class.forward

    def multiply(func: Any, args: Any, kwargs: Any = None) -> torch.Tensor:
        a, b = args
        return torch.mm(
            float8_data(a).to(dtype) / float8_scale(a).to(dtype),
            float8_data(b).to(dtype) / float8_scale(b).to(dtype),
        )

    def amax_to_scale(*args: Any, **kwargs: Any) -> torch.Tensor:
        with without_torch_function():  # scales stay float32, also under `Widen`
            return original_scale(*args, **kwargs)

    def cast_by_float32(*args: Any) -> torch.Tensor:
        with (
            without_torch_function()
        ):  # so that forward and backward cast alike: `Widen` has no effect in a backward
            return original_cast(*args)

    table[mm], float8_utils.amax_to_scale = multiply, amax_to_scale
    cast_class.forward = staticmethod(cast_by_float32)
    try:
        yield
    finally:
        table[mm], float8_utils.amax_to_scale = original_mm, original_scale
        cast_class.forward = staticmethod(original_cast)
