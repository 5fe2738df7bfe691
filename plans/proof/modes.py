"""Two corrections of what a model's own code does during a proof.

`Widen`: a model that computes a norm or a softmax in float32, whatever its inputs are, would hide
everything below 1e-7; during a proof its float32 means the dtype of the proof.
`einsum_by_rank`: torch.einsum asks for sizes in a way in which LocalTensorMode can't answer where
they differ between the ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._local_tensor import LocalTensor, maybe_run_for_local_tensor
from torch.overrides import TorchFunctionMode


class Widen(TorchFunctionMode):
    """Let `dtype` stand wherever torch is asked for float32.

    In the forward only: a function mode is not active in the backward of an autograd.Function.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].to(self.dtype)
        args = tuple(self.dtype if arg is torch.float32 else arg for arg in args)
        return func(*args, **{k: self.dtype if v is torch.float32 else v for k, v in kwargs.items()})


@contextmanager
def einsum_by_rank() -> Iterator[None]:
    """Run torch.einsum rank by rank on simulated shards of different sizes, where no gradient is asked for.

    That is in the backward of fused kernels, which no function mode reaches: so the name is replaced.
    """
    original, by_rank = torch.einsum, maybe_run_for_local_tensor(torch.einsum)

    def einsum(*args: Any, **kwargs: Any) -> Any:
        uneven = not torch.is_grad_enabled() and any(map(_uneven, args))
        return (by_rank if uneven else original)(*args, **kwargs)

    torch.einsum = einsum
    try:
        yield
    finally:
        torch.einsum = original


def _uneven(operand: Any) -> bool:
    return isinstance(operand, LocalTensor) and any(isinstance(n, torch.SymInt) for n in operand.shape)
