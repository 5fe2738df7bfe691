"""Which optimizer each parameter has, with which settings: [optimizer] and [[optimizer.groups]] on a model."""

import difflib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.config.compatibility.groups import OF_ADAM, OF_MUON
from titanplans.config.sections.optimization import Optimizer, OptimizerGroup
from titanplans.errors import ConfigError
from titanplans.parallel.optimizers.muon import Muon
from titanplans.parallel.optimizers.roles import Role, Roles, find_roles, named
from titanplans.parallel.record import record_of
from titanplans.text import show

_log = logging.getLogger(__name__)


@dataclass
class ParameterGroup:
    """Parameters that are updated alike."""

    optimizer: str
    """Adam, AdamW or Muon."""
    settings: dict[str, Any]
    """What the optimizer's class takes for a group."""
    where: str
    """Which parameters these are, in words."""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """By the names that they have in state dicts."""

    def __str__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters.values())
        settings = ", ".join(f"{name} {show(value)}" for name, value in self.settings.items())
        tensors = f"{len(self.parameters)} parameter{'s' * (len(self.parameters) != 1)}"
        return f"{self.optimizer}: {tensors} of {count:,} numbers, {self.where}; {settings}"


def group_parameters(model: nn.Module, options: Optimizer) -> list[ParameterGroup]:
    """Return the trainable parameters of `model` in groups, in the order of the groups of `options`, the rest last.

    Args:
        model: as built, or parallelised by `parallelize`; on any device, meta included.
        options: what [optimizer] says.

    Raises:
        ConfigError: a group's pattern matches nothing, it has a key that none of its parameters reads, Muon is to have
            what is no matrix, or has nothing.
    """
    roles, whole = _roles(model), record_of(model).unsplit_names
    is_stage = record_of(model).stage is not None  # other stages may have what a group is for
    claimed: dict[int, list[tuple[str, nn.Parameter, Role]]] = {}
    frozen = []
    for own, parameter, module in named(model):
        name = whole.get(own, own)
        if not parameter.requires_grad:
            frozen.append(name)
            continue
        found = (at for at, group in enumerate(options.groups) if re.search(group.pattern, name))
        claimed.setdefault(next(found, len(options.groups)), []).append(
            (name, parameter, roles.of(name, parameter, module))
        )
    names = [name for members in claimed.values() for name, _, _ in members]
    for at, group in enumerate(options.groups):
        elsewhere = is_stage and any(re.search(group.pattern, name) for name in roles)
        if at not in claimed and not elsewhere:
            raise ConfigError(f"{_where(at, group)}: {_unmatched(group, names, frozen)}")
    groups: list[ParameterGroup] = []
    for at in sorted(claimed):
        own = options.groups[at] if at < len(options.groups) else None
        groups += _split(own, at, claimed[at], options, of_stage=is_stage)
    if options.name == "Muon" and not is_stage and all(group.optimizer != "Muon" for group in groups):
        raise ConfigError(
            'optimizer.name = "Muon": no parameter that trains is a matrix of a hidden layer, so all would have AdamW: '
            'set optimizer.name = "AdamW"; or let a group name matrices, as adapters\': [[optimizer.groups]] pattern = '
            '"lora_", name = "Muon"'
        )
    return groups


def build_optimizers(model: nn.Module, options: Optimizer, **settings: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of `model`, one of each kind; the log says what each group of parameters has.

    Args:
        model: parallelised by `parallelize`, or whole; it may still be on meta.
        options: what [optimizer] says.
        settings: further arguments of Adam and AdamW, such as capturable=True.

    Raises:
        ConfigError: as `group_parameters`.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for group in group_parameters(model, options):
        _log.info(f"Optimizer {group}")
        own: dict[str, Any] = {
            "params": list(group.parameters.values()),
            "param_names": list(group.parameters),
        }
        kinds.setdefault(group.optimizer, []).append(own | group.settings)
    adam = {
        "fused": options.implementation.startswith("fused"),
        "foreach": options.implementation == "foreach",
    } | settings
    return [
        _muon(model, members)
        if kind == "Muon"
        else getattr(torch.optim, kind)([member | adam for member in members])
        for kind, members in kinds.items()
    ]


def _muon(model: nn.Module, members: list[dict[str, Any]]) -> Muon:
    roles, sections = _roles(model), {}
    whole = record_of(model).unsplit_names
    for name, parameter, module in named(model):
        name = whole.get(name, name)
        if (own := roles.of(name, parameter, module).sections) is not None:
            sections[parameter] = own
    packed = sum(parameter in sections for member in members for parameter in member["params"])
    if packed:
        _log.info(f"Muon: the matrices that {packed} packed parameters hold are orthogonalised one by one")
    if roles.whole is not None:
        _log.info(
            f"Muon: packed parameters are orthogonalised whole, for no plan says what they hold: {roles.whole}"
        )
    return Muon(members, sections=sections, replicas=record_of(model).replicas)


def _roles(model: nn.Module) -> Roles:
    roles = record_of(model).roles
    return find_roles(model) if roles is None else roles


def _split(
    group: OptimizerGroup | None,
    at: int,
    members: list[tuple[str, nn.Parameter, Role]],
    options: Optimizer,
    *,
    of_stage: bool,
) -> Iterator[ParameterGroup]:
    """Yield the parameters of one group of the options by optimizer, and by whether they decay."""

    def value(key: str) -> Any:
        own = None if group is None else getattr(group, key)
        return getattr(options, key) if own is None else own

    found: dict[tuple[str, bool, Any], ParameterGroup] = {}
    for name, parameter, role in members:
        kind = value("name")
        if group is None or group.name is None:
            kind = "AdamW" if kind == "Muon" and not role.hidden else kind
        elif kind == "Muon" and role.fault is not None:
            raise ConfigError(
                f"{_where(at, group)}: {name} is {role.fault}, and Muon takes matrices and stacks of experts'; let the "
                "pattern leave it out"
            )
        own_decay = group is not None and group.weight_decay is not None
        decays = own_decay or options.decay_all or role.decays
        # A fused operator takes DTensors of one mesh.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if (kind, decays, mesh) not in found:
            decay = value("weight_decay") if decays else 0.0
            settings: dict[str, Any] = {"lr": value("lr"), "weight_decay": decay}
            if kind == "Muon":
                settings |= {key: value(key) for key in OF_MUON}
            else:
                settings |= {"betas": (value("beta1"), value("beta2")), "eps": value("eps")}
            where = ("all others" if options.groups else "all") if group is None else f'"{group.pattern}"'
            if not decays:
                where += ": what does not decay (vectors, biases, norms, marked _no_weight_decay)"
            found[kind, decays, mesh] = ParameterGroup(kind, settings, where)
        found[kind, decays, mesh].parameters[name] = parameter
    if group is not None and not of_stage:  # of the whole model this has been looked at
        kinds = {kind for kind, *_ in found}
        for keys, read in ((OF_ADAM, kinds - {"Muon"}), (OF_MUON, kinds & {"Muon"})):
            given = [key for key in keys if getattr(group, key) is not None]
            if given and not read:
                has = " and ".join(sorted(kinds))
                raise ConfigError(
                    f"{_where(at, group)}: {given[0]} = {show(getattr(group, given[0]))} does nothing, for all of its "
                    f"parameters have {has}; leave it out"
                )
    yield from found.values()


def _where(at: int, group: OptimizerGroup) -> str:
    return f'optimizer.groups, table {at + 1} (pattern = "{group.pattern}")'


def _unmatched(group: OptimizerGroup, names: list[str], frozen: list[str]) -> str:
    if taken := [name for name in names if re.search(group.pattern, name)]:
        return f"groups before it have all that it matches, such as {taken[0]}: the first match counts, so put it first"
    if still := [name for name in frozen if re.search(group.pattern, name)]:
        return f"it matches frozen parameters alone, such as {still[0]}; leave it out"
    plain = re.sub(r"\\(.)|[\^$]", r"\1", group.pattern)
    kinds = {re.sub(r"\.\d+\.", ".0.", name): name for name in reversed(names)}
    close = difflib.get_close_matches(
        plain, [*kinds, *{n.split(".")[-2]: n for n in kinds if "." in n}], n=3, cutoff=0.3
    )
    return f"it matches no parameter; there are, for example, {', '.join(close or list(kinds)[:3])}"
