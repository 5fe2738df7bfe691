"""Contexts that change how a model's own code computes during a proof.

`Widen`: a norm or a softmax in float32 would hide every error below 1e-7, so float32 becomes the proof's dtype.
`exact_float8`: torchao emulates float8 products in float32, which would hide the same.
`by_rank`: LocalTensorMode gives no sizes where they differ between the ranks, so some functions run rank by rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titanplans.errors import PlanError
from titanplans.plan.converted import float8_linears
from titanplans.split import gradients
from titanplans.torch_private.dispatch import without_torch_function
from titanplans.torch_private.simulated import (
    LocalTensor,
    dtensor_api,
    maybe_run_for_local_tensor,
    simulated_ranks,
)
from titanplans.torch_private.torchao import cast_to_float8, float8_data, float8_scale

_FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.eye)
"""Without a dtype they make torch's default, float32."""

_ASKING = frozenset((torch.Tensor.float, torch._grouped_mm, *_FACTORIES))
"""What `Widen` looks at even where no argument is float32."""

_FLOAT32 = torch.float32


class Widen(TorchFunctionMode):
    """Let `dtype` stand wherever torch is asked for float32, by name or as the default.

    In the forward only: a function mode is not active in the backward of an autograd.Function.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Every function of torch comes through here, and most of them ask for nothing.
        if not kwargs and func not in _ASKING:
            for arg in args:
                if arg is _FLOAT32:
                    return self._asked(func, args, {})
            result = func(*args)
            if isinstance(result, torch.Tensor) and result.dtype is _FLOAT32 is not self.dtype:
                return self._of_integers(func, args, {}, result)
            return result
        return self._asked(func, args, kwargs or {})

    def _asked(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is torch.Tensor.float:
            return args[0].to(self.dtype)
        if func is torch._grouped_mm and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **kwargs)
        if func in _FACTORIES and kwargs.get("dtype") is None:
            kwargs = kwargs | {"dtype": torch.get_default_dtype()}
        args = tuple(self.dtype if arg is _FLOAT32 else arg for arg in args)
        kwargs = {k: self.dtype if v is _FLOAT32 else v for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype is _FLOAT32 is not self.dtype:
            return self._of_integers(func, args, kwargs, result)
        return result

    def _of_integers(self, func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> torch.Tensor:
        """Return `result` in `dtype` if it is float32 by default: of integers and Python's numbers."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if not tensors or any(x.is_floating_point() for x in tensors):
            return result
        wide = (
            x.to(self.dtype) if isinstance(x, torch.Tensor) and x.dtype is not torch.bool else x for x in args
        )
        return func(*wide, **kwargs).to(self.dtype)


def _grouped_mm(
    rows: torch.Tensor,
    weights: torch.Tensor,
    *,
    offs: torch.Tensor,
    bias: None = None,
    out_dtype: None = None,
) -> torch.Tensor:
    """Multiply each expert's rows [rows, in] by its weight [experts, in, out]; `offs` [experts] are where its rows end.

    In float64 torch has no kernel for it.
    """
    if any(isinstance(tensor, LocalTensor) for tensor in (rows, weights, offs)):
        # No shape may depend on how many rows an expert gets: on each simulated rank it may be another number.
        expert = torch.bucketize(torch.arange(len(rows), device=rows.device), offs, right=True)
        products = (torch.where((expert == e)[:, None], rows, 0) @ weight for e, weight in enumerate(weights))
        return torch.stack(list(products)).sum(0)
    *parts, rest = rows.tensor_split(offs.tolist())
    products = [part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), weights.shape[-1])])


@contextmanager
def by_rank() -> Iterator[None]:
    """Run rank by rank what asks for sizes in which simulated shards may differ.

    That is torch.einsum where no gradient is asked for, in the backward of fused kernels, the norm of a rank's
    gradients, and the strides of a gradient that goes back into a DTensor, which each rank takes from its own shard:
    here the first one's count for all. No function mode reaches these, so the names are replaced.
    """
    einsum, power, info = torch.einsum, gradients.local_power, dtensor_api.compute_global_tensor_info
    einsum_of_each = maybe_run_for_local_tensor(einsum)

    def einsum_by_rank(*args: Any, **kwargs: Any) -> Any:
        uneven = not torch.is_grad_enabled() and any(map(_uneven, args))
        return (einsum_of_each if uneven else einsum)(*args, **kwargs)

    def info_of_the_first(tensor: torch.Tensor, *args: Any) -> Any:
        return info(simulated_ranks(tensor)[0] if _uneven(tensor) else tensor, *args)  # type: ignore[arg-type]

    torch.einsum, gradients.local_power = einsum_by_rank, maybe_run_for_local_tensor(power)
    dtensor_api.compute_global_tensor_info = info_of_the_first  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.einsum, gradients.local_power, dtensor_api.compute_global_tensor_info = einsum, power, info


def _uneven(operand: Any) -> bool:
    return isinstance(operand, LocalTensor) and any(isinstance(n, torch.SymInt) for n in operand.shape)


@contextmanager
def exact_float8(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Multiply float8 numbers in `dtype`, if `model` was converted to float8; nothing else is changed.

    Casting to float8 is a staircase: where two models differ by the rounding of float64, a number ends on
    another stair once in 10^14 times; by that of float32, in every run.

    Raises:
        PlanError: `dtype` is not float64, or the products are not emulated, so not in any dtype but their own.
    """
    linears = float8_linears(model)
    if not linears:
        yield
        return
    from torchao.float8 import float8_ops, float8_utils

    name, linear = next(iter(linears.items()))
    if dtype != torch.float64:
        raise PlanError(
            f"{name} is float8, and dtype = {dtype}: the rounding of {dtype} moves numbers across float8's steps, each "
            "one by a sixteenth of itself, so whole and split can't be compared: prove it in torch.float64"
        )
    if not linear.config.emulate:
        raise PlanError(
            f"{name} multiplies float8 numbers in a kernel, which rounds to bfloat16 or float32: convert the model with "
            "emulate=True to prove it"
        )
    table, operator, scale = (
        float8_ops.FLOAT8_OPS_TABLE,
        torch.ops.aten.mm.default,
        float8_utils.amax_to_scale,
    )
    casting = cast_to_float8()
    cast = casting.forward

    def multiply(func: Any, args: Any, kwargs: Any = None) -> torch.Tensor:
        a, b = args
        return torch.mm(
            float8_data(a).to(dtype) / float8_scale(a).to(dtype),
            float8_data(b).to(dtype) / float8_scale(b).to(dtype),
        )

    def amax_to_scale(*args: Any, **kwargs: Any) -> torch.Tensor:
        with without_torch_function():  # scales are float32, also under `Widen`
            return scale(*args, **kwargs)

    def cast_by_float32(*args: Any) -> torch.Tensor:
        with without_torch_function():  # in a forward as in a backward, where `Widen` does not reach
            return cast(*args)

    product = table[operator]
    table[operator], float8_utils.amax_to_scale = multiply, amax_to_scale
    casting.forward = staticmethod(cast_by_float32)
    try:
        yield
    finally:
        table[operator], float8_utils.amax_to_scale = product, scale
        casting.forward = staticmethod(cast)
