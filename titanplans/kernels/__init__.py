"""PyTorch functions in place of FLA's Triton kernels, for CPU tensors: `install("cpu")` before a model is built.

Importing this package imports no part of FLA and changes nothing; `install` does both. What is replaced, and how exact
and fast it is, stands in docs/kernels.md. Another mixer with a reference of FLA's own is a line in
`table.py`. `check_cpu` says whether a model has all the functions that it needs.
"""

from titanplans.errors import KernelError
from titanplans.kernels.coverage import check_cpu
from titanplans.kernels.install import calls_fla, for_meta, install

__all__ = ["KernelError", "calls_fla", "check_cpu", "for_meta", "install"]
