"""Check whether a model can run on a CPU, that is, whether its code reaches no kernel of FLA that needs a GPU: `check_cpu`.

The search is static: from the `forward` of each FLA module, through the names in its bytecode, to Triton kernels,
flash-attn and FlexAttention. It stops at replacements. Branches that are never taken count, too; functions in tables, or
accessed with `getattr`, are missed. Modules of transformers are plain PyTorch, and not searched.
"""

import dis
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from titanplans.errors import KernelError
from titanplans.kernels.install import MARK
from titanplans.torch_private.compile import enabled_function

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_cpu(model: "PreTrainedModel") -> None:
    """Refuse a model that needs GPU kernels. It may be on the meta device: `check_cpu(titanplans.modeling.build(config))`.

    Raises:
        KernelError: an FLA module reaches a GPU kernel (both are named, with what would work), or `install("cpu")` was not
            called.
    """
    kind = model.config.model_type
    classes = [cls for cls in dict.fromkeys(map(type, model.modules())) if _of_fla(cls)]
    if classes and not hasattr(importlib.import_module("fla.ops.gla").chunk_gla, MARK):
        raise KernelError(f"model_type {kind!r} needs kernels.install('cpu') before it runs on a CPU")
    for cls in classes:
        for name, needs in _needed(cls.forward, cls, seen=set(), via=""):
            raise KernelError(
                f"model_type {kind!r} does not run on a CPU: {cls.__name__} calls {name}, which needs {needs}, and "
                "kernels.install('cpu') has no replacement for it; run it on a GPU (a proof of its plan: "
                "titanplans verify ... --device cuda)"
            )


def _needed(value: Any, cls: type | None, seen: set[int], via: str) -> Iterator[tuple[str, str]]:
    """Yield the GPU kernels that `value` reaches, as pairs: the name that the module's own code calls, and the kernel.

    Args:
        value: a function, a class or a kernel; anything else reaches none.
        cls: the class that `value` is a method of, to follow `self.method`.
        seen: ids of the values searched so far.
        via: the name by which the module's own code calls `value`; empty for that code itself.
    """
    if id(value) in seen or hasattr(value, MARK):
        return
    seen.add(id(value))
    if (kernel := _gpu_kernel(value)) is not None:
        yield via, kernel
    elif isinstance(value, type):
        if issubclass(value, torch.autograd.Function) and _of_fla(value):
            yield from _needed(value.forward, value, seen, via)
            yield from _needed(value.backward, value, seen, via)
    elif isinstance(function := _undecorated(value), FunctionType) and _of_fla(function):
        for name, mentioned, owner in _mentioned(function, cls):
            if mentioned is None and name.startswith("flash_attn"):
                yield via or name, "flash-attn"
            yield from _needed(mentioned, owner, seen, via or ("" if owner else name))


def _gpu_kernel(value: Any) -> str | None:
    """Return the description of `value` if it is a GPU kernel, else None."""
    # Compared by name, so that Triton need not be imported. Autotuners and heuristics wrap the kernel.
    if any(cls.__name__ == "KernelInterface" for cls in type(value).__mro__):
        while not hasattr(value, "__name__"):
            value = value.fn
        return f"the Triton kernel {value.__name__}"
    root, _, rest = (getattr(value, "__module__", None) or "").partition(".")
    if root == "flash_attn":
        return "flash-attn"
    if root == "torch" and rest == "nn.attention.flex_attention" and callable(value):
        return "FlexAttention, whose backward needs a GPU"
    return None


def _mentioned(function: FunctionType, cls: type | None) -> Iterator[tuple[str, Any, type | None]]:
    """Yield name, value and class of everything that a function's code and closure use; the class is None except for
    methods of `cls`."""
    for opcode, name in _names(function.__code__):
        if opcode == "LOAD_GLOBAL" and name in function.__globals__:
            yield name, function.__globals__[name], None
        elif cls is not None and isinstance(method := inspect.getattr_static(cls, name, None), FunctionType):
            yield name, method, cls
    closure_values = inspect.getclosurevars(function).nonlocals
    yield from ((name, value, None) for name, value in closure_values.items())


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield (opcode, name) of every global and attribute in `code` and in the functions defined in it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"):
            yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _undecorated(value: Any) -> Any:
    """Return the function inside decorators that keep it (functools.wraps, torch.compiler.disable)."""
    while (inner := getattr(value, "__wrapped__", enabled_function(value))) is not None:
        value = inner
    return value


def _of_fla(value: Any) -> bool:
    return value.__module__.partition(".")[0] == "fla"
