"""The units of FSDP: which modules are gathered, and whose gradients are reduced, in one collective.

A unit is a module, or several that share one, with all parameters below it that no unit inside it
takes. Found by structure, before anything is sharded, so that what FSDP2 would refuse at the first
forward (a parameter tied across units, a unit of several dtypes) is settled or refused here. How
units are sharded is in `fsdp`; units by a user's own conditions are in `conditions`.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanplans.errors import ParallelError
from titanplans.tensor_parallel.decoder import find_decoder, join

Role = Literal["tower", "embedding", "block", "ends", "condition", "dtype", "root"]


@dataclass(frozen=True)
class Unit:
    """Modules, by fully qualified name, whose parameters are communicated together."""

    names: tuple[str, ...]
    role: Role
    last: bool = False
    """The last block of the decoder: its backward comes first, while it is still gathered."""
    inner: tuple["Unit", ...] = field(default=())
    """Units inside this one that hold what has another dtype."""

    def __str__(self) -> str:
        return " + ".join(name or "the root" for name in self.names)


def find_units(model: nn.Module, towers: Literal["units", "root"] = "units") -> list[Unit]:
    """Return the units of a decoder in the order of its forward: root, towers, embedding, blocks, ends.

    The ends are norm and head. An embedding tied to the head joins them, at its own place in the
    order. The decoder's towers are left to the root with "root". The root is always there, and holds
    what no other unit does.

    Raises:
        PlanError: `model` has no list of blocks.
        ParallelError: a parameter is tied between two units that can't be one.
    """
    decoder = find_decoder(model)
    units = [Unit(("",), "root")]
    if towers == "units":
        blocks = (name for names in decoder.towers for name in names)
        units += [Unit((name,), "tower") for name in blocks if has_parameters(model.get_submodule(name))]
    if decoder.embedding is not None:
        units.append(Unit((decoder.embedding,), "embedding"))
    units += [Unit((name,), "block", last=name == decoder.names[-1]) for name in decoder.names]
    if ends := tuple(name for name in (decoder.norm, decoder.head) if name is not None):
        units.append(Unit(ends, "ends"))
    return _join_tied(model, units)


def _inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def managed(model: nn.Module, unit: Unit, units: Sequence[Unit]) -> dict[str, nn.Parameter]:
    """Return the parameters of `unit` by name: all below it that no other of `units` takes."""
    others = {name for other in _flat(units) if other.names != unit.names for name in other.names}
    params: dict[str, nn.Parameter] = {}
    for name in unit.names:
        params |= _below(model.get_submodule(name), name, others - set(unit.names))
    return params


def _flat(units: Sequence[Unit]) -> Iterator[Unit]:
    for unit in units:
        yield unit
        yield from _flat(unit.inner)


def _below(module: nn.Module, name: str, others: Collection[str]) -> dict[str, nn.Parameter]:
    params = {join(name, key): param for key, param in module._parameters.items() if param is not None}
    for key, child in module.named_children():
        if join(name, key) not in others:
            params |= _below(child, join(name, key), others)
    return params


def _join_tied(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Make embedding and head one unit if they share a weight, and leave to the root what shares with it."""
    while tie := _first_tie(model, units):
        (first, name), (second, other) = tie
        kept = [unit for unit in units if unit not in (first, second)]
        roles = {first.role, second.role}
        if roles == {"embedding", "ends"}:
            embedding, ends = sorted((first, second), key=lambda unit: unit.role == "ends")
            at = units.index(embedding)
            kept.insert(at, Unit(embedding.names + ends.names, "ends"))
        elif roles in ({"root", "embedding"}, {"root", "ends"}):
            kept.insert(0, first if first.role == "root" else second)
        else:
            _refuse_tie(first, name, second, other)
        units = kept
    return units


def refuse_ties(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise ParallelError if two of `units` hold one parameter: FSDP2 can shard it only once."""
    if tie := _first_tie(model, units):
        (first, name), (second, other) = tie
        _refuse_tie(first, name, second, other)


def _refuse_tie(first: Unit, name: str, second: Unit, other: str) -> None:
    raise ParallelError(
        f"{name} and {other} are one parameter in two FSDP units ({first}; {second}): untie them, or shard by "
        "conditions that leave both modules to one unit"
    )


def _first_tie(model: nn.Module, units: Sequence[Unit]) -> tuple[tuple[Unit, str], tuple[Unit, str]] | None:
    seen: dict[int, tuple[Unit, str]] = {}
    for unit in _flat(units):
        for name, param in managed(model, unit, units).items():
            other = seen.setdefault(id(param), (unit, name))
            if other[0] is not unit:
                return other, (unit, name)
    return None


def split_dtypes(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Return `units`, each with the parts of it whose trainable parameters have another dtype as units inside.

    The dtype of most elements stays. FSDP2 reduces the gradients of a unit in one dtype; frozen
    parameters of any dtype may stay, since they have none.

    Raises:
        ParallelError: a module itself holds trainable parameters of two dtypes; a parameter has no dimension.
    """
    for name, param in model.named_parameters():
        if param.ndim == 0:
            raise ParallelError(
                f"{name} is a single number without a dimension, of which FSDP can shard none: give it the shape (1,)"
            )
    taken = {name for unit in units for name in unit.names}
    split = []
    for unit in units:
        parts = [(name, *_dtype_of(model, name, taken)) for name in unit.names]
        kept = _most([(dtype, numel) for _, dtype, numel, _ in parts])
        inner = [sub for *_, subs in parts for sub in subs]
        inner += [(name, dtype) for name, dtype, *_ in parts if dtype not in (kept, None)]
        names = tuple(name for name in unit.names if name not in dict(inner))
        split.append(replace(unit, names=names, inner=_inner_units(inner)))
    refuse_ties(model, split)
    return split


def _inner_units(parts: Sequence[tuple[str, torch.dtype | None]]) -> tuple[Unit, ...]:
    """Return one unit a dtype, or one a part where a part stands inside another, which goes last."""
    if any(_inside(name, other) for name, _ in parts for other, _ in parts):
        return tuple(Unit((name,), "dtype") for name, _ in parts)
    dtypes = dict.fromkeys(dtype for _, dtype in parts)
    return tuple(Unit(tuple(name for name, its in parts if its == dtype), "dtype") for dtype in dtypes)


def _dtype_of(
    model: nn.Module, name: str, taken: Collection[str]
) -> tuple[torch.dtype | None, int, list[tuple[str, torch.dtype | None]]]:
    """Return the dtype that stays with the module, its number of elements, and what to split off, inner first."""
    own = {key: p for key, p in _own(model, name).items() if p.requires_grad}
    numels: Counter[torch.dtype] = Counter()
    for param in own.values():
        numels[param.dtype] += param.numel()
    if len(numels) > 1:
        named = {param.dtype: key for key, param in own.items()}
        raise ParallelError(
            ", ".join(f"{key} is {str(dtype).removeprefix('torch.')}" for dtype, key in named.items())
            + f": FSDP reduces the gradients of one module in one dtype; cast one, freeze one, or move it to "
            f"a module of its own inside {name or type(model).__name__}"
        )
    parts = [
        (child, *_dtype_of(model, child, taken)) for child in _children(model, name) if child not in taken
    ]
    kept = next(iter(numels), None) or _most([(dtype, numel) for _, dtype, numel, _ in parts])
    split = [sub for *_, subs in parts for sub in subs]
    split += [(child, dtype) for child, dtype, *_ in parts if dtype not in (kept, None)]
    stays = numels.total() + sum(numel for _, dtype, numel, _ in parts if dtype == kept)
    return kept, stays, split


def _most(numels: Sequence[tuple[torch.dtype | None, int]]) -> torch.dtype | None:
    totals: Counter[torch.dtype] = Counter()
    for dtype, numel in numels:
        if dtype is not None:
            totals[dtype] += numel
    return totals.most_common(1)[0][0] if totals else None


def fsdp_module(model: nn.Module, name: str) -> FSDPModule:
    """Return the module called `name`, which FSDP2 has made one of its own.

    Raises:
        ParallelError: it has not.
    """
    module = model.get_submodule(name)
    if not isinstance(module, FSDPModule):
        raise ParallelError(
            f"{name or type(model).__name__} is not sharded by FSDP: shard the whole model first"
        )
    return module


def has_parameters(module: nn.Module) -> bool:
    """Whether `module` or a module below it holds a parameter."""
    return any(True for _ in module.parameters())


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called; a ModuleList, which FSDP can't hook, can't."""
    return type(module).forward is not nn.Module.forward


def _own(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the parameters that the module holds itself, or in a container that has no forward."""
    module = model.get_submodule(name)
    params = {join(name, key): param for key, param in module._parameters.items() if param is not None}
    for key, child in module.named_children():
        if not has_forward(child):
            params |= _own(model, join(name, key))
    return params


def _children(model: nn.Module, name: str) -> Iterator[str]:
    """Yield the children that can be called, through containers that can't."""
    for key, child in model.get_submodule(name).named_children():
        if has_forward(child):
            yield join(name, key)
        else:
            yield from _children(model, join(name, key))
