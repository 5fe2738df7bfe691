"""`initialize`: set the initial weights of a split model, with values that do not depend on how it is split.

`titanplans.modeling.reference` computes full tensors, and each rank keeps its shards. Only the dicts `_parameters` and
`_buffers` of the split model's modules are used, so its hooks, replaced classes and wrappers have no effect.
"""

from collections.abc import Collection, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from titanplans.adapters.low_rank import draw_factor
from titanplans.errors import ModelError
from titanplans.modeling.reference import InitUnit, Reference, tensors
from titanplans.precision import nf4
from titanplans.split.adapted import is_factor
from titanplans.split.decoder import AbsentModule, join, without_wrappers
from titanplans.split.parameters.shards import copy_shard


def initialize(model: PreTrainedModel, *, seed: int, only: Collection[str] | None = None) -> None:
    """Set every parameter and buffer to its initial value, in place, and tie the parameters that the config ties.

    Call this after the model has been parallelised and `model.to_empty(device=...)` has been called. The values are those of
    the model's constructor and `_init_weights`, drawn in float32 and rounded to each parameter's dtype; adapters get the
    values of `low_rank.draw_factor`. All values depend on `seed`, the config and the type of device, not on ranks,
    placements or dtype. Only one full unit (a decoder layer, the embedding, the head) is in memory at a time, and nothing
    is communicated. The random states of the CPU and of the model's device are restored.

    Args:
        model: a model that `titanplans.modeling.build` has built; parameters are plain tensors or DTensors with any
            placements. It may lack modules of the config's model (a pipeline stage), but must not have other modules.
        seed: the seed, which has to be the same on every rank.
        only: if given, only these buffers are initialised, and parameters keep their values.

    Raises:
        ModelError: a tensor is on the meta device, is initialised neither by its module's constructor nor by
            `_init_weights`, or is not in the config's model.
    """
    remaining = named_tensors(model)
    owners = None
    if only is not None:
        remaining = {name: tensor for name, tensor in remaining.items() if name in only}
    for name in [name for name in remaining if is_factor(name)]:
        factor = remaining.pop(name)
        copy_shard(factor, draw_factor(name, factor.shape, seed), name=name)
    if only is not None:
        paths = {name.rpartition(".")[0] for name in remaining}
        owners = [module for path, module in model.named_modules() if without_wrappers(path) in paths]
        if not remaining:
            return
    reference = Reference(model, next(model.parameters()).device, seed, owners)
    writer = Writer(model, remaining, reference.tied)
    for unit in reference.units():
        module = writer.modules.get(unit.path)
        if isinstance(module, AbsentModule) and not any(_is_of(name, unit) for name in writer.tied_to_absent):
            continue
        if module is not None and (only is None or any(_is_of(name, unit) for name in remaining)):
            for name, value in reference.values(unit).items():
                writer.write(name, value)
    tie(model, reference.tied)
    for name in remaining.keys() - reference.tied.keys():
        raise ModelError(f"{name} is not in the model that its config describes: nothing initialises it")


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move only the model's buffers to the device. With CPU offload, the parameters stay on the CPU."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


class Writer:
    """Writes full tensors into the parameters of a model, which may be split, in NF4, or a pipeline stage.

    Args:
        model: the model to write into.
        unwritten: the model's tensors that have to be written, by name; each is removed when it is written.
        tied: the source of each tied parameter.
    """

    def __init__(self, model: nn.Module, unwritten: dict[str, torch.Tensor], tied: Mapping[str, str]):
        self.modules = {without_wrappers(path): module for path, module in model.named_modules()}
        self.unwritten = unwritten
        # In a pipeline stage, the source of a tied parameter may be in another stage. Then the value of the source is
        # written to the tied parameter.
        self.tied_to_absent = {
            source: name for name, source in tied.items() if name in unwritten and source not in unwritten
        }

    @torch.no_grad()
    def write(self, name: str, value: torch.Tensor) -> None:
        """Write this rank's shard of `value` into the tensor `name`, if it has not been written yet."""
        owner, _, attribute = name.rpartition(".")
        codes, scales = f"{owner}.{nf4.CODES}", f"{owner}.{nf4.SCALES}"
        if attribute == "weight" and codes in self.unwritten:
            nf4.write(self.modules[owner], value, owner)
            del self.unwritten[codes], self.unwritten[scales]
        elif (local_name := self.tied_to_absent.get(name, name)) in self.unwritten:
            copy_shard(self.unwritten.pop(local_name), value, name=local_name)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their names in the module tree; a tied tensor occurs under each of its names.

    Raises:
        ModelError: one of them is on the meta device.
    """
    named = {
        join(without_wrappers(path), name): tensor
        for path, module in model.named_modules()
        for name, tensor in tensors(module).items()
    }
    for name, tensor in named.items():
        if tensor.is_meta:
            raise ModelError(f"{name} has no memory yet: call model.to_empty(device=...) first")
    return named


def tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Make each tied parameter the same object as its source again, after `to_empty` has separated them."""
    targets = {without_wrappers(path): module for path, module in model.named_modules()}
    for target, source in tied.items():
        path, _, name = target.rpartition(".")
        source_path, _, source_name = source.rpartition(".")
        if (
            path in targets
            and name in targets[path]._parameters
            and source_name in targets[source_path]._parameters
        ):
            targets[path]._parameters[name] = targets[source_path]._parameters[source_name]


def _is_of(name: str, unit: InitUnit) -> bool:
    """Whether `unit` initialises the tensor `name`."""
    if unit.constructor is None:
        return name.rpartition(".")[0] == unit.path
    return name.startswith(f"{unit.path}.")
