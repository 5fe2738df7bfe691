"""Build the optimizers of a model from [optimizer] and [[optimizer.groups]]. Start at `build_optimizers`."""

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
    """Parameters with the same optimizer and settings."""

    optimizer: str
    """Adam, AdamW or Muon."""
    settings: dict[str, Any]
    """The options of the optimizer's param group."""
    where: str
    """A description of the parameters, for the log."""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """The parameters by their names in state dicts."""

    def __str__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters.values())
        settings = ", ".join(f"{name} {show(value)}" for name, value in self.settings.items())
        tensors = f"{len(self.parameters)} parameter{'s' * (len(self.parameters) != 1)}"
        return f"{self.optimizer}: {tensors} ({count:,} elements), {self.where}; {settings}"


def group_parameters(model: nn.Module, options: Optimizer) -> list[ParameterGroup]:
    """Return the trainable parameters of `model` in groups, in the order of `options.groups`, all other parameters last.

    Args:
        model: as built, or parallelised by `parallelize`; on any device, meta included.
        options: the options of [optimizer].

    Raises:
        ConfigError: a group's pattern matches no parameter, a group has an option that none of its optimizers uses, a
            group gives Muon a parameter that is no matrix, or Muon has no parameter.
    """
    roles, unsplit_names = _roles(model), record_of(model).unsplit_names
    is_stage = record_of(model).stage is not None  # all parameters of a group may be in other stages
    members_by_group: dict[int, list[tuple[str, nn.Parameter, Role]]] = {}
    frozen = []
    for local_name, parameter, module in named(model):
        name = unsplit_names.get(local_name, local_name)
        if not parameter.requires_grad:
            frozen.append(name)
            continue
        matches = (index for index, group in enumerate(options.groups) if re.search(group.pattern, name))
        members_by_group.setdefault(next(matches, len(options.groups)), []).append(
            (name, parameter, roles.of(name, parameter, module))
        )
    names = [name for members in members_by_group.values() for name, _, _ in members]
    for index, group in enumerate(options.groups):
        is_elsewhere = is_stage and any(re.search(group.pattern, name) for name in roles)
        if index not in members_by_group and not is_elsewhere:
            raise ConfigError(f"{_where(index, group)}: {_unmatched(group, names, frozen)}")
    groups: list[ParameterGroup] = []
    for index in sorted(members_by_group):
        group_options = options.groups[index] if index < len(options.groups) else None
        groups += _split(group_options, index, members_by_group[index], options, of_stage=is_stage)
    if options.name == "Muon" and not is_stage and all(group.optimizer != "Muon" for group in groups):
        raise ConfigError(
            'optimizer.name = "Muon": no trainable parameter is a matrix of a hidden layer, so AdamW would update all: '
            'set optimizer.name = "AdamW"; or name matrices in a group, such as those of adapters: [[optimizer.groups]] '
            'pattern = "lora_", name = "Muon"'
        )
    return groups


def build_optimizers(model: nn.Module, options: Optimizer, **settings: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of `model`, one of each class, and log the settings of each group of parameters.

    Args:
        model: parallelised by `parallelize`, or not; it may be on meta.
        options: the options of [optimizer].
        settings: further arguments of Adam and AdamW, such as capturable=True.

    Raises:
        ConfigError: as `group_parameters`.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for group in group_parameters(model, options):
        _log.info(f"Optimizer {group}")
        parameters: dict[str, Any] = {
            "params": list(group.parameters.values()),
            "param_names": list(group.parameters),
        }
        kinds.setdefault(group.optimizer, []).append(parameters | group.settings)
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
    unsplit_names = record_of(model).unsplit_names
    for name, parameter, module in named(model):
        name = unsplit_names.get(name, name)
        if (packed_sections := roles.of(name, parameter, module).sections) is not None:
            sections[parameter] = packed_sections
    packed = sum(parameter in sections for member in members for parameter in member["params"])
    if packed:
        _log.info(f"Muon: the matrices packed in {packed} parameters are orthogonalised one by one")
    if roles.sections_unknown is not None:
        _log.info(
            f"Muon: a packed parameter is orthogonalised as one matrix, since no plan has its sections: "
            f"{roles.sections_unknown}"
        )
    return Muon(members, sections=sections, replicas=record_of(model).replicas)


def _roles(model: nn.Module) -> Roles:
    roles = record_of(model).roles
    return find_roles(model) if roles is None else roles


def _split(
    group: OptimizerGroup | None,
    index: int,
    members: list[tuple[str, nn.Parameter, Role]],
    options: Optimizer,
    *,
    of_stage: bool,
) -> Iterator[ParameterGroup]:
    """Split the parameters of one group of the options by optimizer, by whether they have weight decay, and by mesh."""

    def value(key: str) -> Any:
        group_value = None if group is None else getattr(group, key)
        return getattr(options, key) if group_value is None else group_value

    groups: dict[tuple[str, bool, Any], ParameterGroup] = {}
    for name, parameter, role in members:
        kind = value("name")
        if group is None or group.name is None:
            kind = "AdamW" if kind == "Muon" and not role.hidden else kind
        elif kind == "Muon" and role.fault is not None:
            raise ConfigError(
                f"{_where(index, group)}: {name} is {role.fault}, and Muon takes only matrices, and stacks of them; "
                "change the pattern so that it does not match"
            )
        sets_decay = group is not None and group.weight_decay is not None
        decays = sets_decay or options.decay_all or role.decays
        # One group per mesh: a fused operator takes only DTensors of the same mesh.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if (kind, decays, mesh) not in groups:
            decay = value("weight_decay") if decays else 0.0
            settings: dict[str, Any] = {"lr": value("lr"), "weight_decay": decay}
            if kind == "Muon":
                settings |= {key: value(key) for key in OF_MUON}
            else:
                settings |= {"betas": (value("beta1"), value("beta2")), "eps": value("eps")}
            where = ("in no group" if options.groups else "all") if group is None else f'"{group.pattern}"'
            if not decays:
                where += ": without weight decay (vectors, biases, norms, marked _no_weight_decay)"
            groups[kind, decays, mesh] = ParameterGroup(kind, settings, where)
        groups[kind, decays, mesh].parameters[name] = parameter
    # Not on a pipeline stage: the parameters that an option is for may be on another stage.
    if group is not None and not of_stage:
        kinds = {kind for kind, *_ in groups}
        for keys, users in ((OF_ADAM, kinds - {"Muon"}), (OF_MUON, kinds & {"Muon"})):
            unused = [key for key in keys if getattr(group, key) is not None]
            if unused and not users:
                optimizers = " and ".join(sorted(kinds))
                raise ConfigError(
                    f"{_where(index, group)}: {unused[0]} = {show(getattr(group, unused[0]))} does nothing, since all its "
                    f"parameters are updated by {optimizers}; leave it out"
                )
    yield from groups.values()


def _where(index: int, group: OptimizerGroup) -> str:
    return f'optimizer.groups, table {index + 1} (pattern = "{group.pattern}")'


def _unmatched(group: OptimizerGroup, names: list[str], frozen: list[str]) -> str:
    if taken := [name for name in names if re.search(group.pattern, name)]:
        return f"earlier groups already match all its parameters, such as {taken[0]}: put it first"
    if matching := [name for name in frozen if re.search(group.pattern, name)]:
        return f"it matches only frozen parameters, such as {matching[0]}; leave it out"
    plain = re.sub(r"\\(.)|[\^$]", r"\1", group.pattern)
    kinds = {re.sub(r"\.\d+\.", ".0.", name): name for name in reversed(names)}
    close = difflib.get_close_matches(
        plain, [*kinds, *{n.split(".")[-2]: n for n in kinds if "." in n}], n=3, cutoff=0.3
    )
    return f"it matches no parameter; there are, for example, {', '.join(close or list(kinds)[:3])}"
