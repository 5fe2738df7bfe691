"""FLA's own Triton kernels on a CPU, by Triton's interpreter: slow, and an oracle for what stands in for them.

    TRITON_INTERPRET=1 python ...        # read when Triton is imported

    interpreted.start()                  # in place of kernels.install: CPU tensors go to Triton's kernels from here on

What it can't tell: compilation, shared memory, races between programs, rounding in tensor cores, what an autotuner picks.
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
    fla.accept_a_cpu()  # of functions that `install` then has in hand
    install("cpu")
    use_interpreter()


def widen(on: bool = True) -> None:
    """From here on let kernels compute in float32 what they round to 16 bits on the way, and MesaNet's solve to the end.

    `on` False: no longer. So it shows whether a difference is a kernel's own rounding, and a plan's error is not lost in it.
    """
    from titanplans.kernels.interpreted import fla, language

    language.widen(on)
    fla.widen(on)
