"""`Widen` makes a model's code compute in float64 where it asks for float32.

A norm or a softmax in float32 would hide every error below 1e-7 from a proof.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.eye)
"""Functions that make float32 tensors, the default, if no dtype is passed."""

_ASKING = frozenset((torch.Tensor.float, torch._grouped_mm, *_FACTORIES))
"""Functions that `Widen` handles even if torch.float32 is not among their arguments."""

_FLOAT32 = torch.float32


class Widen(TorchFunctionMode):
    """Compute in `dtype` wherever torch is asked for float32, by name or as the default.

    This has an effect only in the forward: a function mode is inactive in the backward of an autograd.Function.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Every torch function passes through here, and few calls name a dtype. All other calls have to be fast.
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
        """Return `result` in `dtype` if it is float32 because integers and Python numbers were promoted."""
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
    """Multiply each expert's tokens [tokens, in] by its weight [experts, in, out]; `offs` [experts]: where its tokens end.

    torch has no float64 kernel for this.
    """
    *parts, rest = rows.tensor_split(offs.tolist())
    products = [part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), weights.shape[-1])])
