"""Run the host code of FLA's Triton kernels without launching them, for steps on fake CPU tensors.

    without_launches.start(processors=132, shared_memory=232448)       # in a process of its own
    with without_launches.reported(lambda kernel, tensors: ...):
        ...                                                            # a step

FLA's functions then allocate and save the tensors that they would on a GPU. The replacements of `kernels.install` would
allocate other tensors: for a block of GLA they keep five times as many bytes for the backward. Nothing is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from titanplans.extras import is_installed

_listener: Callable[[str, Sequence[torch.Tensor]], None] | None = None


def start(*, processors: int, shared_memory: int) -> None:
    """From now on let CPU tensors through to FLA's host code, and make each launch of a kernel do nothing.

    There is no way back, so call it in a process that does nothing else.

    Args:
        processors: the number of multiprocessors of the GPU, by which FLA divides some work.
        shared_memory: the shared memory of a multiprocessor in bytes, by which FLA chooses block sizes.
    """
    if not is_installed("fla"):
        return
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    from titanplans.kernels.install import install, use_interpreter
    from titanplans.kernels.interpreted import fla

    for kind in (JITFunction, Autotuner, Heuristics):
        kind.run = _report
    fla.remove_checks(
        processors=processors, shared_memory=shared_memory
    )  # before `install`, which wraps the same functions
    install("cpu")
    use_interpreter()


@contextmanager
def reported(listener: Callable[[str, Sequence[torch.Tensor]], None]) -> Iterator[None]:
    """In the body, call `listener` instead of each launch, with the kernel's name and the tensors among its arguments."""
    global _listener
    _listener, before = listener, _listener
    try:
        yield
    finally:
        _listener = before


def _report(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace the launch of a kernel: report it to the listener, and run nothing."""
    if _listener is not None:
        kernel = self
        # An autotuner wraps heuristics, which wrap a kernel, which wraps a function.
        while hasattr(kernel, "fn"):
            kernel = kernel.fn
        _listener(kernel.__name__, [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])
