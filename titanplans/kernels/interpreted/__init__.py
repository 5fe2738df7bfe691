"""FLA's own Triton kernels on a CPU, by Triton's interpreter: slow, and the reference for their replacements.

    TRITON_INTERPRET=1 python ...        # read when Triton is imported

    interpreted.start()                  # in place of kernels.install: CPU tensors go to Triton's kernels from here on

It does not cover compilation, shared memory, races between programs, rounding in tensor cores, and autotuning.
"""

import os

from titanplans.errors import KernelError


def start() -> None:
    """Let FLA's Triton kernels compute CPU tensors in this process.

    Raises:
        KernelError: Triton was imported without TRITON_INTERPRET=1.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelError(
            "Triton's kernels run on a CPU by its interpreter alone, and it was imported without; set TRITON_INTERPRET=1"
        )
    from titanplans.kernels.install import install, use_interpreter
    from titanplans.kernels.interpreted import fla, language

    language.complete()
    fla.accept_a_cpu()  # before `install`, which wraps the same functions
    install("cpu")
    use_interpreter()


def widen(on: bool = True) -> None:
    """Let kernels keep 16-bit intermediates in float32, and MesaNet's solve to convergence; `on` False: no longer.

    This separates the kernels' own rounding from a plan's error.
    """
    from titanplans.kernels.interpreted import fla, language

    language.widen(on)
    fla.widen(on)
