"""PyTorch functions in place of FLA's Triton kernels, for CPU tensors: `install("cpu")` before a model is built.

Importing this package does not import FLA and changes nothing; `install` imports FLA and replaces its functions.
`table.py` lists the replaced functions, and docs/kernels.md describes them. `check_cpu` refuses a model that needs a
kernel without a replacement.
"""

from titanplans.errors import KernelError
from titanplans.kernels.coverage import check_cpu
from titanplans.kernels.install import calls_fla, for_meta, install

__all__ = ["KernelError", "calls_fla", "check_cpu", "for_meta", "install"]
