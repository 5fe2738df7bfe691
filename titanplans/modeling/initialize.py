"""Initial weights for a model that is already split: the same values however it is split.

Where the values come from is `titanplans.modeling.reference`; here each rank keeps its part of them. Of the split
model nothing but the tables of parameters and buffers is touched, so hooks, swapped classes and wrappers
on its modules don't matter.
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
    """Give every parameter and buffer its initial value, in place, and tie again what the config ties.

    Call it after the model was parallelised and `model.to_empty(device=...)`. Values are those of the
    model's own initialisation (constructor, then `_init_weights`), drawn in float32 and rounded to each
    parameter's dtype; adapters get those of `low_rank.draw_factor`. They depend on `seed`, the config and
    the kind of device, and not on ranks, placements or dtype. One unit (a decoder layer, the embedding, the
    head) is in memory in full at a time. No communication; the random state of the CPU and of the model's
    device is left as it was.

    Args:
        model: as `titanplans.modeling.build` made it; parameters are plain tensors or DTensors with any placements. It
            may lack modules (a pipeline stage) but not have others.
        seed: the same on every rank.
        only: if given, these buffers alone get values, and parameters keep theirs.

    Raises:
        ModelError: a tensor is still on the meta device, is initialised neither by its module's
            constructor nor by `_init_weights`, or is not in the model that the config describes.
    """
    todo = named_tensors(model)
    owners = None
    if only is not None:
        todo = {name: tensor for name, tensor in todo.items() if name in only}
    for name in [name for name in todo if is_factor(name)]:
        factor = todo.pop(name)
        copy_shard(factor, draw_factor(name, factor.shape, seed), name=name)
    if only is not None:
        paths = {name.rpartition(".")[0] for name in todo}
        owners = [module for path, module in model.named_modules() if without_wrappers(path) in paths]
        if not todo:
            return
    reference = Reference(model, next(model.parameters()).device, seed, owners)
    writer = Writer(model, todo, reference.tied)
    for unit in reference.units():
        module = writer.modules.get(unit.path)
        if isinstance(module, AbsentModule) and not any(_is_of(name, unit) for name in writer.alone):
            continue
        if module is not None and (only is None or any(_is_of(name, unit) for name in todo)):
            for name, value in reference.values(unit).items():
                writer.write(name, value)
    tie(model, reference.tied)
    for name in todo.keys() - reference.tied.keys():
        raise ModelError(f"{name} is not in the model that its config describes: nothing initialises it")


class Writer:
    """Writes whole tensors of a model into one that has it: split in any way, in NF4, or as a stage of a pipeline.

    Args:
        model: it.
        left: tensors of it, by name; what is written is taken out.
        tied: each tied parameter, and the one that it is tied to.
    """

    def __init__(self, model: nn.Module, left: dict[str, torch.Tensor], tied: Mapping[str, str]):
        self.modules = {without_wrappers(path): module for path, module in model.named_modules()}
        self.left = left
        # In a stage of a pipeline the one that it is tied to may be another stage's.
        self.alone = {source: name for name, source in tied.items() if name in left and source not in left}

    @torch.no_grad()
    def write(self, name: str, value: torch.Tensor) -> None:
        """Write this rank's part of `value`, if the tensor of this name is left."""
        owner, _, own = name.rpartition(".")
        codes, scales = f"{owner}.{nf4.CODES}", f"{owner}.{nf4.SCALES}"
        if own == "weight" and codes in self.left:
            nf4.write(self.modules[owner], value, owner)
            del self.left[codes], self.left[scales]
        elif (here := self.alone.get(name, name)) in self.left:
            copy_shard(self.left.pop(here), value, name=here)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's own parameters and buffers by their names in the module tree; a tied one is there by each name.

    Raises:
        ModelError: one is still on the meta device.
    """
    found = {
        join(without_wrappers(path), name): tensor
        for path, module in model.named_modules()
        for name, tensor in tensors(module).items()
    }
    for name, tensor in found.items():
        if tensor.is_meta:
            raise ModelError(f"{name} has no memory yet: call model.to_empty(device=...) first")
    return found


def tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Make each tied parameter the same object as its source; `to_empty` has made them two."""
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
    """Whether `unit` gives the tensor its value."""
    if unit.make is None:
        return name.rpartition(".")[0] == unit.path
    return name.startswith(f"{unit.path}.")
