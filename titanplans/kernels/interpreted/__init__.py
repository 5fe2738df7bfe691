"""Run FLA's Triton kernels on a CPU with Triton's interpreter, as slow references for their replacements.

    TRITON_INTERPRET=1 python ...        # Triton reads this variable at its import

    interpreted.start()                  # instead of kernels.install: CPU tensors are passed to Triton kernels from now on

The interpreter does not test compilation, shared memory, races between programs, rounding in tensor cores, or autotuning.
"""

import os

from titanplans.errors import KernelError


def start() -> None:
    """Make FLA's Triton kernels accept CPU tensors in this process.

    Raises:
        KernelError: Triton was imported without TRITON_INTERPRET=1.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelError(
            "Triton kernels run on a CPU only in the interpreter, and Triton was imported without it: set TRITON_INTERPRET=1"
        )
    from titanplans.kernels.install import install, use_interpreter
    from titanplans.kernels.interpreted import fla, language

    language.complete()
    fla.remove_checks()  # before `install`, which wraps the same functions
    install("cpu")
    use_interpreter()


def widen(on: bool = True) -> None:
    """Switch exact kernels on or off: with float32 for 16-bit intermediates, and a MesaNet solver that converges.

    A difference between the unsplit and the split model is then an error of the plan, not rounding inside of kernels.
    """
    from titanplans.kernels.interpreted import fla, language

    language.widen(on)
    fla.widen(on)
