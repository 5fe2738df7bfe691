"""Let graphs end on a CPU where they end on a GPU: at the kernels that flash-linear-attention takes out of every graph.

`titanplans.kernels` puts PyTorch functions in place of some of them, which a graph could hold.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType

import torch

from titanplans.kernels.install import MARK
from titanplans.torch_private.compile import is_disabled


@contextmanager
def graphs_end_as_on_a_gpu() -> Iterator[None]:
    """Take the CPU functions out of every graph whose originals FLA takes out; inside of the context alone."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] != "fla":
                continue
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and hasattr(value, MARK) and _is_out_on_a_gpu(value):
                    stack.callback(setattr, module, key, value)
                    setattr(module, key, torch.compiler.disable(value))
        yield


def _is_out_on_a_gpu(function: FunctionType) -> bool:
    original = inspect.getclosurevars(function).nonlocals.get("original")
    return is_disabled(original)
