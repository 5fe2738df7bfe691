"""Remove checks of flash-linear-attention that refuse a CPU or float32, which the interpreter supports.

The source of a function is compiled without its check, and the result replaces the function in all modules of FLA.
"""

import __future__

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import torch

_PROCESSORS = 4
"""Number of multiprocessors of a simulated GPU. Without a GPU, FLA assumes one multiprocessor, and selects code that no
GPU runs."""

_CHECKS = {
    "delta_rule.chunk:chunk_delta_rule": "assert q.dtype != torch.float32",
    "gated_delta_product.chunk:chunk_gated_delta_product": "assert q.dtype != torch.float32",
    "parallax.parallel:parallel_parallax": "if q.dtype not in (torch.bfloat16, torch.float16)",
    "attnres.fused:fused_attnres_fwd": "if not residuals[0].is_cuda",
}
"""Maps functions of fla.ops to the source code of the check that is removed."""
_CYFA = "not q.is_cuda"
"""The source code of the checks in fla.ops.cyfa.utils."""


def remove_checks(*, processors: int = _PROCESSORS, shared_memory: int | None = None) -> None:
    """Remove the checks. Call this once per process.

    Args:
        processors: the number of multiprocessors of the pretended GPU.
        shared_memory: its shared memory in bytes; None: FLA assumes the smallest.
    """
    for place, check in _CHECKS.items():
        module, _, name = place.partition(":")
        _remove_check(importlib.import_module(f"fla.ops.{module}"), name, check)
    from fla.ops.cyfa import utils
    from fla.utils import hardware

    for name, value in list(vars(utils).items()):
        plain = inspect.unwrap(value)
        is_defined_here = inspect.isfunction(plain) and plain.__module__ == utils.__name__
        if is_defined_here and _CYFA in inspect.getsource(plain):
            _remove_check(utils, name, _CYFA)
    _replace_everywhere(hardware.get_multiprocessor_count, lambda *_, **__: processors)
    if shared_memory is not None:
        _replace_everywhere(hardware.get_all_max_shared_mem, lambda: [shared_memory])
        hardware.check_shared_mem.cache_clear()


def widen(on: bool) -> None:
    """Make MesaNet's kernels cast queries, keys and states to float32 instead of 16 bits, or stop doing so."""
    for name in ("chunk", "chunk_h_fwd"):
        importlib.import_module(f"fla.ops.mesa_net.{name}").__dict__["torch"] = _WideTorch() if on else torch


class _WideTorch:
    """The module torch, in which the 16-bit dtypes are float32."""

    float16 = bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _remove_check(module: Any, name: str, check: str) -> None:
    old = vars(module)[name]
    plain = inspect.unwrap(old)
    source = textwrap.dedent(inspect.getsource(plain))
    passes = (
        "assert True" if check.startswith("assert") else "if False" if check.startswith("if") else "False"
    )
    assert check in source, f"fla.ops changed: {module.__name__}.{name} has no {check!r}"
    namespace: dict[str, Any] = {}
    code = compile(
        source.replace(check, passes), inspect.getfile(plain), "exec", __future__.annotations.compiler_flag
    )
    exec(code, plain.__globals__, namespace)
    _replace_everywhere(old, namespace[name])


def _replace_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "fla":
            for key in [key for key, value in vars(module).items() if value is old]:
                setattr(module, key, new)
