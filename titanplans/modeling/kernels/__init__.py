"""PyTorch functions in place of FLA's Triton kernels, for CPU tensors: `install("cpu")` before a model is built.

Importing this package imports no part of FLA and changes nothing; `install` does both. What is replaced, and how exact
and fast it is, stands in docs/cpu-kernels.md. Another mixer's CPU function is added as a module here and a line
in `install.py`. `check_cpu` says whether that is enough for a model.
"""

from titanplans.errors import KernelError
from titanplans.modeling.kernels.coverage import check_cpu
from titanplans.modeling.kernels.install import install

__all__ = ["KernelError", "check_cpu", "install"]
