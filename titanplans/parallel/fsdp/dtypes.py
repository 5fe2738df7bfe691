"""Split FSDP units by dtype: FSDP2 gathers a unit in one dtype and reduces its gradients in one dtype."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import nn

from titanplans.errors import ParallelError
from titanplans.parallel.fsdp.units import FSDPUnit, flat, has_forward, refuse_ties
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.split.decoder import join
from titanplans.text import class_name

Kind = Hashable | None
"""A property that all parameters of a unit have in common, such as the dtype; None: the parameter fits in any unit."""


def split_dtypes(
    model: nn.Module, units: Sequence[FSDPUnit], param_dtype: torch.dtype | None = None
) -> list[FSDPUnit]:
    """Return `units` with inner units for the modules whose parameters have another dtype than the rest of the unit.

    Parameters with the dtype of most elements stay in the outer unit. Frozen parameters of any dtype may stay there too,
    since they have no gradients to reduce. Parameters that the model keeps in float32 while FSDP casts to `param_dtype`
    get inner units (`FSDPUnit.kept`), frozen or not.

    Raises:
        ParallelError: one module directly holds parameters of two dtypes, or a parameter has no dimension.
    """
    for name, param in model.named_parameters():
        if param.ndim == 0:
            raise ParallelError(f"{name} has no dimension that FSDP could shard: give it the shape (1,)")
    split = list(units)
    keeps = keeps_float32(model, param_dtype)
    if any(keeps(name) for name, _ in model.named_parameters()):

        def refuse_kept(named: dict[Kind, str], module: str) -> ParallelError:
            return ParallelError(
                f"{class_name(model)} keeps {named[True]} in float32, and {named[False]} of the same module, {module}, "
                f"would compute in {str(param_dtype).removeprefix('torch.')}: FSDP casts all parameters that "
                "one module holds directly to one dtype; leave mixed_precision_param out, or take autocast_dtype"
            )

        split = _split(model, split, lambda name, param: keeps(name), refuse_kept)
    by_dtype = iter(
        _split(model, list(flat(split)), lambda _, p: p.dtype if p.requires_grad else None, _refuse_dtypes)
    )
    result = []
    for unit in split:
        outer = next(by_dtype)
        # All inner units are in one flat list, innermost first: a unit comes after the units inside it.
        inner = [
            each
            for kept in islice(by_dtype, len(unit.inner))
            for each in (*kept.inner, replace(kept, inner=()))
        ]
        result.append(replace(outer, inner=(*inner, *outer.inner)))
    refuse_ties(model, result)
    return result


def _refuse_dtypes(named: dict[Kind, str], module: str) -> ParallelError:
    return ParallelError(
        ", ".join(f"{key} is {str(dtype).removeprefix('torch.')}" for dtype, key in named.items())
        + ": FSDP reduces the gradients of one module in one dtype; cast one, freeze one, or move it to "
        f"a module of its own inside {module}"
    )


def _split(
    model: nn.Module,
    units: Sequence[FSDPUnit],
    kind_of: Callable[[str, nn.Parameter], Kind],
    refuse: Callable[[dict[Kind, str], str], ParallelError],
) -> list[FSDPUnit]:
    """Return `units` with inner units for modules whose parameters differ in kind from most elements of the unit.

    `kind_of` returns the kind of a parameter. `refuse` returns the error for a module that holds parameters of two kinds.
    Inner units are listed innermost first.
    """
    taken = {name for unit in units for name in unit.names}

    def of_module(name: str) -> tuple[Kind, int, list[tuple[str, Kind]]]:
        """Return the kind that stays in the module, its number of elements, and the modules to split off, inner first."""
        numels: Counter[Kind] = Counter()
        named: dict[Kind, str] = {}
        for key, param in _direct_parameters(model, name).items():
            if (kind := kind_of(key, param)) is not None:
                numels[kind] += param.numel()
                named[kind] = key
        if len(numels) > 1:
            raise refuse(named, name or class_name(model))
        children = [(child, *of_module(child)) for child in _children(model, name) if child not in taken]
        outer = next(iter(numels)) if numels else _most([(kind, numel) for _, kind, numel, _ in children])
        inner = [sub for *_, subs in children for sub in subs]
        inner += [(child, kind) for child, kind, *_ in children if kind not in (outer, None)]
        return outer, numels.total() + sum(numel for _, kind, numel, _ in children if kind == outer), inner

    split = []
    for unit in units:
        modules = [(name, *of_module(name)) for name in unit.names]
        outer = _most([(kind, numel) for _, kind, numel, _ in modules])
        inner = [sub for *_, subs in modules for sub in subs]
        inner += [(name, kind) for name, kind, *_ in modules if kind not in (outer, None)]
        names = tuple(name for name in unit.names if name not in dict(inner))
        inside = tuple(
            FSDPUnit(names, "dtype", kept=kind is True or unit.kept) for names, kind in _inner_units(inner)
        )
        split.append(replace(unit, names=names, inner=inside, kept=outer is True or unit.kept))
    return split


def _inner_units(modules: Sequence[tuple[str, Kind]]) -> list[tuple[tuple[str, ...], Kind]]:
    """Return one unit for each kind; if a module is inside another one, one unit for each module."""
    if any(name.startswith(f"{other}.") for name, _ in modules for other, _ in modules):
        return [((name,), kind) for name, kind in modules]
    return [
        (tuple(name for name, other in modules if other == kind), kind)
        for kind in dict.fromkeys(kind for _, kind in modules)
    ]


def _most(numels: Sequence[tuple[Kind, int]]) -> Kind:
    totals: Counter[Kind] = Counter()
    for kind, numel in numels:
        if kind is not None:
            totals[kind] += numel
    return totals.most_common(1)[0][0] if totals else None


def _direct_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the parameters that the module holds directly, or in a child without a forward, such as a ParameterList."""
    module = model.get_submodule(name)
    params = {join(name, key): param for key, param in module._parameters.items() if param is not None}
    for key, child in module.named_children():
        if not has_forward(child):
            params |= _direct_parameters(model, join(name, key))
    return params


def _children(model: nn.Module, name: str) -> Iterator[str]:
    """Yield the names of the nearest modules below `name` that have a forward."""
    for key, child in model.get_submodule(name).named_children():
        if has_forward(child):
            yield join(name, key)
        else:
            yield from _children(model, join(name, key))
