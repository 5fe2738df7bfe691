"""Install the references of `table.py` in FLA's modules, for calls with CPU tensors. Start at `install`.

All replacements are installed the same way: by name, in every module of FLA that imported the function. The replacement
calls the reference for CPU tensors, and the original for all others. For an autograd.Function `apply` is replaced, so that
torch differentiates the reference.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import BuiltinMethodType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from titanplans.errors import KernelError
from titanplans.extras import is_installed
from titanplans.kernels.naive import Naive, by_naive
from titanplans.kernels.recurrent.recurrence import Recurrence, by_formula
from titanplans.kernels.table import NOT_TRITON, REFERENCES, Reference

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MARK = "cpu_function"
"""Attribute of a replacement that holds its reference. A second `install`, and `coverage`, look for it."""


_interpreted = False
"""See `use_interpreter`."""


_FOR_META = ContextVar("for_meta", default=False)


@contextmanager
def for_meta() -> Iterator[None]:
    """Within the context, replacements also take tensors on meta, for which no Triton kernel runs."""
    token = _FOR_META.set(True)
    try:
        yield
    finally:
        _FOR_META.reset(token)


def use_interpreter(on: bool = True) -> None:
    """From now on pass CPU tensors to FLA's Triton kernels, which Triton's interpreter runs; with `on=False`, stop doing
    so.

    Functions that are not Triton kernels stay replaced. See `titanplans.kernels.interpreted`.
    """
    global _interpreted
    _interpreted = on


def install(device_type: str) -> None:
    """On "cpu", install PyTorch functions in place of FLA's Triton kernels; on any other device type, do nothing.

    Call it before a model is built; a second call changes nothing. On a machine with GPUs, calls with CUDA tensors still use
    FLA's kernels. Without FLA there is nothing to replace.
    """
    if device_type != "cpu" or not is_installed("fla"):
        return
    owners = [_find(key) for key in REFERENCES]
    if all(hasattr(getattr(owner, name, None), MARK) for owner, name in owners):
        return
    names = _names()
    for (owner, name), (key, reference) in zip(owners, REFERENCES.items(), strict=True):
        _replace(owner, name, reference, names, triton=key not in NOT_TRITON)


def calls_fla(config: "PretrainedConfig") -> bool:
    """Whether a model of transformers may call FLA's kernels: its file contains the package's name.

    Such a file imports the kernels when it is imported itself, so `install` has to be called first.
    """
    module = type(config).__module__
    if not module.startswith("transformers."):
        return False
    spec = importlib.util.find_spec(module.replace("configuration_", "modeling_"))
    return spec is not None and spec.origin is not None and '"fla"' in Path(spec.origin).read_text("utf-8")


Names = dict[Any, list[tuple[dict[str, Any], str]]]
"""Maps each value to the tables that hold it, each with the value's name in the table."""


def _find(key: str) -> tuple[Any, str]:
    """Return the module, or the class, of a key of `REFERENCES`, and the name in it."""
    module, _, path = key.partition(":")
    *outer, name = path.split(".")
    return functools.reduce(getattr, outer, importlib.import_module(module)), name


def _names() -> Names:
    """Return the values in the globals of the loaded FLA modules, and in the dicts among these globals.

    Modules that are loaded later import the replacements.
    """
    tables_of: Names = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "fla":
            continue
        for table in [
            vars(module),
            *(inner_table for inner_table in vars(module).values() if type(inner_table) is dict),
        ]:
            for name, value in table.items():
                tables_of.setdefault(_key(value), []).append((table, name))
    return tables_of


def _key(value: Any) -> Any:
    """Return a key that is equal for the same value: each access to `apply` of a Function creates another, equal object.

    `apply` is a Python method; from torch 2.15 on, a built-in one.
    """
    return value if isinstance(value, MethodType | BuiltinMethodType) else id(value)


def _replace(owner: Any, name: str, reference: Reference, names: Names, *, triton: bool) -> None:
    original: Any = getattr(owner, name, None)
    if hasattr(original, MARK):
        return
    if isinstance(reference, Recurrence):
        reference = by_formula(original, reference)
    elif isinstance(reference, Naive):
        reference = by_naive(original, reference)
    if isinstance(original, type) and issubclass(original, torch.autograd.Function):
        # Keep the replacement outside of every graph of torch.compile, as the kernels are on a GPU.
        replacement = torch.compiler.disable(_on_cpu(reference, original.apply, triton=triton))
        _rebind(original.apply, replacement, names)
        original.apply = staticmethod(replacement)
        setattr(original, MARK, reference)
        return
    replacement = _on_cpu(reference, original, triton=triton)
    if original is not None:
        _rebind(original, replacement, names)
    setattr(owner, name, replacement)


def _rebind(original: Any, replacement: Any, names: Names) -> None:
    """Replace `original` in the globals of loaded FLA modules, and in their tables."""
    for table, name in names.get(_key(original), ()):
        table[name] = replacement


def _on_cpu(
    reference: Callable[..., Any], original: Callable[..., Any] | None, *, triton: bool
) -> Callable[..., Any]:
    """Return a function that calls `reference` for CPU tensors and `original` (None: not installed) for all others.

    If Triton is interpreted, CPU tensors also go to `original` if that is a Triton kernel. A call with packed documents is
    kept outside of graphs, like a kernel, because the reference splits documents by their lengths, and these are values
    that a graph can't use.
    """
    # `parallel.compile.graph_breaks` searches closures for functions that are kept out of graphs. It does not search a
    # tuple, so calls without documents stay in graphs.
    out_of_graphs = (torch.compiler.disable(reference),)

    @functools.wraps(reference)
    def choose(*args: Any, **kwargs: Any) -> Any:
        if _first_is_on_cpu(*args, **kwargs) and not (_interpreted and triton):
            if kwargs.get("cu_seqlens") is not None and torch.compiler.is_compiling():
                return out_of_graphs[0](*args, **kwargs)
            return reference(*args, **kwargs)
        if original is None:
            raise KernelError(
                f"{reference.__name__}: its package is not installed, and these are not CPU tensors"
            )
        return original(*args, **kwargs)

    setattr(choose, MARK, reference)
    return choose


def _first_is_on_cpu(*args: Any, **kwargs: Any) -> bool:
    """Whether the first tensor is on a CPU; in the context `for_meta`, also whether it is on meta.

    Later tensors may be host copies of lengths.

    A call without tensors, such as the creation of a mask from lengths, counts as a call on a CPU if there is no GPU.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu" or (value.is_meta and _FOR_META.get())
    return not torch.accelerator.is_available()
