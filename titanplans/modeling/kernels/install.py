"""Puts the CPU functions of this package where FLA's modules will find them.

Two ways in. FLA's own dispatch (`fla.backends`), for the functions it covers: a backend that accepts calls with
CPU tensors. And for the functions it does not cover, the name itself, in every module of FLA that holds it:
a function that computes CPU tensors here and hands any other call to the original.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from titanplans.errors import KernelError
from titanplans.modeling.kernels import (
    activations,
    attention,
    convolution,
    gla,
    losses,
    norms,
    residuals,
    rotary,
)

# Module of FLA -> (our module, the names of functions that both have). All are entry points of fla.backends.
_DISPATCHED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "fla.modules.norm.layernorm": (norms, ("layer_norm_fwd", "layer_norm_bwd")),
    "fla.modules.norm.fused_norm_gate": (norms, ("layer_norm_gated_fwd", "layer_norm_gated_bwd")),
    "fla.modules.norm.l2norm": (norms, ("l2norm_fwd", "l2norm_bwd")),
    "fla.modules.activations.ops": (
        activations,
        (
            *("sigmoid_fwd", "sigmoid_bwd", "swish_fwd", "swish_bwd", "logsigmoid_fwd", "logsigmoid_bwd"),
            *("swiglu_fwd", "swiglu_fwdbwd", "powglu_fwd", "powglu_fwdbwd"),
        ),
    ),
    "fla.modules.causal_conv1d.ops": (
        convolution,
        ("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update_states", "causal_conv1d_update"),
    ),
    "fla.modules.rotary.ops": (rotary, ("rotary_embedding_fwdbwd",)),
    "fla.modules.fused_cross_entropy.ops": (losses, ("cross_entropy_loss",)),
}

# The same for functions out of the dispatch's reach, replaced by name wherever FLA imported them.
_REPLACED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "fla.ops.gla.chunk": (gla, ("chunk_gla",)),
    "fla.ops.gla.fused_recurrent": (gla, ("fused_recurrent_gla",)),
    "fla.modules.fused_linear_cross_entropy.ops": (losses, ("fused_linear_cross_entropy_loss",)),
    "fla.modules.activations.ops": (
        activations,
        ("gelu_fwd", "gelu_bwd", "bias_gelu", "bias_gelu_bwd", "sqrelu_fwd", "sqrelu_bwd"),
    ),
}

# These import flash-attn, which may be absent: then the names are None, or missing.
_FLASH_ATTENTION_MODULES = ("fla.layers.attn", "fla.layers.bitattn", "fla.layers.mla", "fla.layers.rodimus")

MARK = "cpu_function"  # attribute of what is installed: a second install, and `coverage`, know it by that


def install(device_type: str) -> None:
    """On "cpu": PyTorch functions in place of FLA's Triton kernels, for CPU tensors only. Otherwise nothing, by design.

    Call it before a model is built; twice is as good as once. On a GPU machine it may be called too: calls with
    CUDA tensors go to FLA's kernels as before.

    Raises:
        KernelError: FLA's dispatch is switched off in the environment, so nothing could be installed.
    """
    if device_type != "cpu":
        return
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise KernelError(
            "FLA_DISABLE_BACKEND_DISPATCH=1 leaves FLA without CPU kernels; unset it, or run on a GPU"
        )
    importlib.import_module("fla")
    _register_backends()
    _replace_functions()
    _replace_flash_attention()
    _replace_loss_module()


def _register_backends() -> None:
    from fla.backends import BaseBackend, register

    class CPUBackend(BaseBackend):
        backend_type = "titanplans_cpu"
        priority = -1  # asked first; it accepts CPU tensors only, which no other backend can compute

    for module_name, (ours, names) in _DISPATCHED.items():
        module = importlib.import_module(module_name)
        for name in names:
            register(getattr(module, name), backend=CPUBackend, verifier=_accept)(getattr(ours, name))
            setattr(getattr(module, name), MARK, getattr(ours, name))

    class CPUAttnResBackend(CPUBackend):
        fused_attnres = staticmethod(residuals.fused_attnres)
        fused_attnres_verifier = staticmethod(lambda query, *args, **kwargs: _accept(query))

    register("attnres")(CPUAttnResBackend)
    setattr(importlib.import_module("fla.ops.attnres").fused_attnres, MARK, residuals.fused_attnres)


def _replace_functions() -> None:
    for module_name, (ours, names) in _REPLACED.items():
        module = importlib.import_module(module_name)
        for name in names:
            original = getattr(module, name)
            if not hasattr(original, MARK):
                _rebind(original, name, _on_cpu(getattr(ours, name), original))


def _rebind(original: Any, name: str, replacement: Any) -> None:
    """Every global of a loaded FLA module that is `original` becomes `replacement`.

    FLA imports its functions by name, so the module that defines one is not where a layer looks it up. Modules
    loaded later import the replacement.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "fla" and vars(module).get(name) is original:
            setattr(module, name, replacement)


def _replace_flash_attention() -> None:
    for module_name in _FLASH_ATTENTION_MODULES:
        module = importlib.import_module(module_name)
        for name in ("flash_attn_func", "flash_attn_varlen_func"):
            original = getattr(module, name, None)
            if not hasattr(original, MARK):
                setattr(module, name, _on_cpu(getattr(attention, name), original))


def _replace_loss_module() -> None:
    from fla.modules import FusedCrossEntropyLoss

    original = FusedCrossEntropyLoss.forward
    if not hasattr(original, MARK):
        FusedCrossEntropyLoss.forward = _on_cpu(losses.fused_cross_entropy_module, original)


def _on_cpu(cpu_function: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    """`cpu_function` for calls with CPU tensors, `original` (None: not installed) for all others."""

    @functools.wraps(cpu_function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        if _has_cpu_tensor(*args, **kwargs):
            return cpu_function(*args, **kwargs)
        if original is None:
            raise KernelError(
                f"{cpu_function.__name__}: flash-attn is not installed, and these are not CPU tensors"
            )
        return original(*args, **kwargs)

    setattr(choose, MARK, cpu_function)
    return choose


def _accept(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    """Verifier of a backend: whether it takes the call, and why not."""
    return (True, None) if _has_cpu_tensor(*args, **kwargs) else (False, "computes CPU tensors only")


def _has_cpu_tensor(*args: Any, **kwargs: Any) -> bool:
    """Whether the first tensor is on a CPU; host copies of lengths may follow CUDA tensors."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu"
    return False
