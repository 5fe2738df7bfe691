"""Checks of flash-linear-attention that refuse a CPU, or float32, where its kernels need no such check.

A function's source is compiled without its check, and takes the function's place wherever FLA's modules hold it.
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
"""FLA takes one for a machine without a GPU, and then paths that no GPU takes."""

_CHECKS = {
    "delta_rule.chunk:chunk_delta_rule": "assert q.dtype != torch.float32",
    "gated_delta_product.chunk:chunk_gated_delta_product": "assert q.dtype != torch.float32",
    "parallax.parallel:parallel_parallax": "if q.dtype not in (torch.bfloat16, torch.float16)",
    "attnres.fused:fused_attnres_fwd": "if not residuals[0].is_cuda",
}
"""Function of fla.ops -> the condition that refuses."""
_CYFA = "not q.is_cuda"
"""In several functions of fla.ops.cyfa.utils."""


def accept_a_cpu() -> None:
    """Take the checks out; once in a process."""
    for place, check in _CHECKS.items():
        module, _, name = place.partition(":")
        _without(importlib.import_module(f"fla.ops.{module}"), name, check)
    from fla.ops.cyfa import utils
    from fla.utils import hardware

    for name, value in list(vars(utils).items()):
        plain = inspect.unwrap(value)
        is_own = inspect.isfunction(plain) and plain.__module__ == utils.__name__
        if is_own and _CYFA in inspect.getsource(plain):
            _without(utils, name, _CYFA)
    _everywhere(hardware.get_multiprocessor_count, lambda *_, **__: _PROCESSORS)


def widen(on: bool) -> None:
    """Let MesaNet's kernels have float32 queries, keys and states in place of 16 bits; or as they are."""
    for name in ("chunk", "chunk_h_fwd"):
        importlib.import_module(f"fla.ops.mesa_net.{name}").__dict__["torch"] = _Wide() if on else torch


class _Wide:
    """The module torch, in which 16 bits are float32."""

    float16 = bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _without(module: Any, name: str, check: str) -> None:
    old = vars(module)[name]
    plain = inspect.unwrap(old)
    source = textwrap.dedent(inspect.getsource(plain))
    passes = (
        "assert True" if check.startswith("assert") else "if False" if check.startswith("if") else "False"
    )
    assert check in source, f"fla.ops changed: {module.__name__}.{name} has no {check!r}"
    found: dict[str, Any] = {}
    code = compile(
        source.replace(check, passes), inspect.getfile(plain), "exec", __future__.annotations.compiler_flag
    )
    exec(code, plain.__globals__, found)
    _everywhere(old, found[name])


def _everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "fla":
            for key in [key for key, value in vars(module).items() if value is old]:
                setattr(module, key, new)
