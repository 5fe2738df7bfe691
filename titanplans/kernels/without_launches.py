"""Run the host code of FLA's Triton kernels without launching them, for steps on fake CPU tensors.

    without_launches.start(processors=132, shared_memory=232448)       # in a process of its own

FLA's functions then allocate and save the tensors that they would on a GPU. The replacements of `kernels.install` allocate
others: for a block of GLA they keep five times as much for the backward. Nothing is computed.
"""

from typing import Any

from titanplans.extras import is_installed


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
        kind.run = _do_nothing
    fla.remove_checks(
        processors=processors, shared_memory=shared_memory
    )  # before `install`, which wraps the same functions
    install("cpu")
    use_interpreter()


def _do_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Take the place of a launch."""
