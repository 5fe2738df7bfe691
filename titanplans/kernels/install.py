"""Puts the references of `table.py` where FLA's modules will find them, for calls with CPU tensors.

One way in for all: the name. FLA imports functions by name, so every module of FLA that holds one gets a function in its
place that computes CPU tensors by the reference and hands any other call to the original. Of an autograd.Function it is
`apply` that is replaced, so that torch differentiates the reference.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from titanplans.errors import KernelError
from titanplans.kernels.naive import Naive, by_naive
from titanplans.kernels.recurrent.recurrence import Recurrence, by_formula
from titanplans.kernels.table import NOT_TRITON, REFERENCES, Reference

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MARK = "cpu_function"
"""Attribute of installed functions, the reference: a second `install`, and `coverage`, know them by it."""


_interpreted = False
"""See `use_interpreter`."""


_FOR_META = ContextVar("for_meta", default=False)


@contextmanager
def for_meta() -> Iterator[None]:
    """Let what stands in for a CPU compute the shapes of tensors on meta, too, where no Triton kernel runs."""
    token = _FOR_META.set(True)
    try:
        yield
    finally:
        _FOR_META.reset(token)


def use_interpreter(on: bool = True) -> None:
    """From here on let CPU tensors go to FLA's Triton kernels, as Triton's interpreter runs them; or no longer.

    What no Triton kernel computes is computed as before. See `titanplans.kernels.interpreted`.
    """
    global _interpreted
    _interpreted = on


def install(device_type: str) -> None:
    """On "cpu": PyTorch functions in place of FLA's Triton kernels, for CPU tensors only. Otherwise nothing, by design.

    Call it before a model is built; twice is as good as once. On a GPU machine it may be called too: calls with
    CUDA tensors go to FLA's kernels as before.
    """
    if device_type != "cpu":
        return
    places = [_find(place) for place in REFERENCES]
    if all(hasattr(getattr(owner, name, None), MARK) for owner, name in places):
        return
    names = _names()
    for (owner, name), (place, reference) in zip(places, REFERENCES.items(), strict=True):
        _replace(owner, name, reference, names, triton=place not in NOT_TRITON)


def calls_fla(config: "PretrainedConfig") -> bool:
    """Whether the code of a model of transformers may call FLA's kernels: its file names the package.

    Such a file takes them when it is imported, so `install` has to come before.
    """
    module = type(config).__module__
    if not module.startswith("transformers."):
        return False
    spec = importlib.util.find_spec(module.replace("configuration_", "modeling_"))
    return spec is not None and spec.origin is not None and '"fla"' in Path(spec.origin).read_text("utf-8")


Names = dict[Any, list[tuple[dict[str, Any], str]]]
"""Of each value the tables that hold it, and under which name there."""


def _find(place: str) -> tuple[Any, str]:
    """Return the module, or the class in it, of a place in `REFERENCES`, and the name there."""
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    return functools.reduce(getattr, outer, importlib.import_module(module)), name


def _names() -> Names:
    """Return what the loaded FLA modules hold, as globals and in their tables. Modules loaded later import replacements."""
    found: Names = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "fla":
            continue
        for table in [vars(module), *(held for held in vars(module).values() if type(held) is dict)]:
            for name, value in table.items():
                found.setdefault(_key(value), []).append((table, name))
    return found


def _key(value: Any) -> Any:
    """Return what is equal of one value, however it was got: `apply` is another object at each access, an equal one."""
    return value if isinstance(value, MethodType) else id(value)


def _replace(owner: Any, name: str, reference: Reference, names: Names, *, triton: bool) -> None:
    original: Any = getattr(owner, name, None)
    if hasattr(original, MARK):
        return
    if isinstance(reference, Recurrence):
        reference = by_formula(original, reference)
    elif isinstance(reference, Naive):
        reference = by_naive(original, reference)
    if isinstance(original, type) and issubclass(original, torch.autograd.Function):
        # Out of every graph of torch.compile, as the kernels behind it are on a GPU.
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
    """Every global of a loaded FLA module, and every entry of its tables, that is `original` becomes `replacement`."""
    for table, name in names.get(_key(original), ()):
        table[name] = replacement


def _on_cpu(
    reference: Callable[..., Any], original: Callable[..., Any] | None, *, triton: bool
) -> Callable[..., Any]:
    """`reference` for calls with CPU tensors, `original` (None: not installed) for all others.

    Where Triton is interpreted, CPU tensors go to an `original` that is `triton`'s, too.

    With documents it is out of graphs, as a kernel is: it takes them apart by their lengths, which a graph can't read.
    """
    out_of_graphs = (torch.compiler.disable(reference),)  # a tuple: without documents it is no such function

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
    """Whether the first tensor is on a CPU, or in `for_meta` on meta; host copies of lengths may follow CUDA tensors.

    What takes no tensors, such as a mask by lengths, works where there is no GPU.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu" or (value.is_meta and _FOR_META.get())
    return not torch.accelerator.is_available()
