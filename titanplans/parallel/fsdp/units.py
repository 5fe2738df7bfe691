"""FSDP units: modules whose parameters are gathered, and whose gradients are reduced, in one collective.

`find_units` finds the units of a decoder before it is sharded; `dtypes` adds inner units, `sharding` applies them, and
`conditions` finds units by the caller's conditions.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanplans.errors import ParallelError
from titanplans.split.decoder import find_decoder, join, within
from titanplans.text import class_name

Role = Literal["tower", "embedding", "block", "ends", "condition", "dtype", "experts", "root"]


@dataclass(frozen=True)
class FSDPUnit:
    """One or several modules, by fully qualified names, whose parameters are communicated together.

    The parameters below these modules are included, except those of other units.
    """

    names: tuple[str, ...]
    role: Role
    last: bool = False
    """This is the decoder's last block. Its backward comes first, so it stays gathered until then."""
    inner: tuple["FSDPUnit", ...] = field(default=())
    """Units inside this one, for parameters with another dtype, compute dtype or mesh; innermost first."""
    kept: bool = False
    """The model keeps these parameters in float32: FSDP does not cast them to its `param_dtype`."""

    def __str__(self) -> str:
        return " + ".join(name or "the root" for name in self.names)


def find_units(model: nn.Module, towers: Literal["blocks", "root"] = "blocks") -> list[FSDPUnit]:
    """Return the units of a decoder in the order of its forward: root, towers, embedding, blocks, ends.

    The ends are the final norm and the head. If the embedding is tied to the head, embedding and ends are one unit, at the
    embedding's position. The root has all parameters that are in no other unit.

    Args:
        model: a decoder, not yet sharded.
        towers: "blocks": each block of a tower is a unit; "root": towers belong to the root.

    Raises:
        PlanError: `model` has no list of blocks.
        ParallelError: a parameter is tied between two units that can't be joined.
    """
    decoder = find_decoder(model)
    units = [FSDPUnit(("",), "root")]
    if towers == "blocks":
        blocks = (name for names in decoder.towers for name in names)
        units += [FSDPUnit((name,), "tower") for name in blocks if has_parameters(model.get_submodule(name))]
    if decoder.embedding is not None:
        units.append(FSDPUnit((decoder.embedding,), "embedding"))
    units += [FSDPUnit((name,), "block", last=name == decoder.names[-1]) for name in decoder.names]
    if ends := tuple(name for name in (decoder.norm, decoder.head) if name is not None):
        units.append(FSDPUnit(ends, "ends"))
    return _join_tied(model, units)


def managed(model: nn.Module, unit: FSDPUnit, units: Sequence[FSDPUnit]) -> dict[str, nn.Parameter]:
    """Return the parameters of `unit` by name: all parameters below its modules that belong to no other of `units`."""
    others = {name for other in flat(units) if other.names != unit.names for name in other.names}
    params: dict[str, nn.Parameter] = {}
    for name in unit.names:
        params |= _below(model.get_submodule(name), name, others - set(unit.names))
    return params


def flat(units: Sequence[FSDPUnit]) -> Iterator[FSDPUnit]:
    """Yield each unit, and after it the units inside it."""
    for unit in units:
        yield unit
        yield from flat(unit.inner)


def _below(module: nn.Module, name: str, others: Collection[str]) -> dict[str, nn.Parameter]:
    params = {join(name, key): param for key, param in module._parameters.items() if param is not None}
    for key, child in module.named_children():
        if join(name, key) not in others:
            params |= _below(child, join(name, key), others)
    return params


def _join_tied(model: nn.Module, units: list[FSDPUnit]) -> list[FSDPUnit]:
    """Join embedding and ends if they share a parameter; merge one of them into the root if it shares one with the root."""
    while tie := _first_tie(model, units):
        (first, name), (second, other) = tie
        remaining = [unit for unit in units if unit not in (first, second)]
        roles = {first.role, second.role}
        if roles == {"embedding", "ends"}:
            embedding, ends = sorted((first, second), key=lambda unit: unit.role == "ends")
            position = units.index(embedding)
            remaining.insert(position, FSDPUnit(embedding.names + ends.names, "ends"))
        elif roles in ({"root", "embedding"}, {"root", "ends"}):
            remaining.insert(0, first if first.role == "root" else second)
        else:
            _refuse_tie(first, name, second, other)
        units = remaining
    return units


def refuse_ties(model: nn.Module, units: Sequence[FSDPUnit]) -> None:
    """Raise ParallelError if two of `units` hold one parameter: FSDP2 can shard it only once."""
    if tie := _first_tie(model, units):
        (first, name), (second, other) = tie
        _refuse_tie(first, name, second, other)


def _refuse_tie(first: FSDPUnit, name: str, second: FSDPUnit, other: str) -> None:
    raise ParallelError(
        f"{name} and {other} are one parameter in two FSDP units ({first}; {second}): untie them, or call "
        "shard_model with conditions that put both modules into one unit"
    )


def _first_tie(
    model: nn.Module, units: Sequence[FSDPUnit]
) -> tuple[tuple[FSDPUnit, str], tuple[FSDPUnit, str]] | None:
    seen: dict[int, tuple[FSDPUnit, str]] = {}
    for unit in flat(units):
        for name, param in managed(model, unit, units).items():
            other = seen.setdefault(id(param), (unit, name))
            if other[0] is not unit:
                return other, (unit, name)
    return None


def fsdp_module(model: nn.Module, name: str) -> FSDPModule:
    """Return the module called `name` as an FSDPModule.

    Raises:
        ParallelError: it is not sharded by FSDP2.
    """
    module = model.get_submodule(name)
    if not isinstance(module, FSDPModule):
        raise ParallelError(f"{name or class_name(model)} is not sharded by FSDP: shard the full model first")
    return module


def has_parameters(module: nn.Module) -> bool:
    """Whether `module` or a module below it holds a parameter."""
    return any(True for _ in module.parameters())


def has_forward(module: nn.Module) -> bool:
    """Whether `module` has a forward. A ModuleList has none, so FSDP can't hook it."""
    return type(module).forward is not nn.Module.forward


def split_experts(model: nn.Module, units: Sequence[FSDPUnit]) -> list[FSDPUnit]:
    """Return `units` with inner units for the modules that hold experts of expert parallelism, which have another mesh."""
    experts = [name for name, module in model.named_modules() if _is_expert_parallel(module)]
    result, unassigned = [], dict.fromkeys(experts)
    # Deepest units first: a module of experts belongs to the innermost unit around it.
    for unit in sorted(units, key=lambda unit: -max(name.count(".") for name in unit.names)):
        names = [name for name in unassigned if any(within(name, outer) for outer in unit.names)]
        for name in names:
            del unassigned[name]
        inside = tuple(FSDPUnit((name,), "experts", unit.last) for name in names)
        result.append(replace(unit, inner=(*inside, *unit.inner)))
    return sorted(result, key=lambda unit: [u.names for u in units].index(unit.names))


def _is_expert_parallel(module: nn.Module) -> bool:
    dtensors = [param for param in module._parameters.values() if isinstance(param, DTensor)]
    return any("ep" in (param.device_mesh.mesh_dim_names or ()) for param in dtensors)
