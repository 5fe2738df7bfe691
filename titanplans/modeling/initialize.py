"""Initial weights for a model that is already split: the same values however it is split.

Where the values come from is `titanplans.modeling.reference`; here each rank keeps its part of them. Of the split
model nothing but the tables of parameters and buffers is touched, so hooks, swapped classes and wrappers
on its modules don't matter.
"""

from torch import nn
from transformers import PreTrainedModel

from titanplans.errors import ModelError
from titanplans.modeling.reference import Reference, tensors
from titanplans.tensor_parallel.decoder import join
from titanplans.tensor_parallel.shards import copy_shard

# Components that activation checkpointing and torch.compile add to module paths.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def initialize(model: PreTrainedModel, *, seed: int) -> None:
    """Give every parameter and buffer its initial value, in place, and tie again what the config ties.

    Call it after the model was parallelised and `model.to_empty(device=...)`. Values are those of the
    model's own initialisation (constructor, then `_init_weights`), drawn in float32 and rounded to each
    parameter's dtype. They depend on `seed`, the config and the kind of device, and not on ranks,
    placements or dtype. One unit (a decoder layer, the embedding, the head) is in memory in full at a
    time. No communication; the random state of the CPU and of the model's device is left as it was.

    Args:
        model: as `titanplans.modeling.build` made it; parameters are plain tensors or DTensors with any placements. It
            may lack modules (a pipeline stage) but not have others.
        seed: the same on every rank.

    Raises:
        ModelError: a tensor is still on the meta device, is initialised neither by its module's
            constructor nor by `_init_weights`, or is not in the model that the config describes.
    """
    targets = {_without_wrappers(path): module for path, module in model.named_modules()}
    todo = {
        join(path, name): tensor
        for path, module in targets.items()
        for name, tensor in tensors(module).items()
    }
    for name, tensor in todo.items():
        if tensor.is_meta:
            raise ModelError(f"{name} has no memory yet: call model.to_empty(device=...) first")
    reference = Reference(model, device=next(model.parameters()).device, seed=seed)
    for unit in reference.units():
        if unit.path in targets:
            for name, value in reference.values(unit).items():
                if name in todo:
                    copy_shard(todo.pop(name), value, name=name)
    _tie(targets, reference.tied)
    for name in todo.keys() - reference.tied.keys():
        raise ModelError(f"{name} is not in the model that its config describes: nothing initialises it")


def _tie(targets: dict[str, nn.Module], tied: dict[str, str]) -> None:
    """Make each tied parameter the same object as its source; `to_empty` has made them two."""
    for target, source in tied.items():
        path, _, name = target.rpartition(".")
        source_path, _, source_name = source.rpartition(".")
        if path in targets and source_path in targets:
            targets[path]._parameters[name] = targets[source_path]._parameters[source_name]


def _without_wrappers(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)
