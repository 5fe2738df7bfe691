"""Published names of weights, and those of the module tree: transformers' own conversions, both ways.

Most names are the same. What differs is in transformers' table (`transformers.conversion_mapping`): renamed modules and
towers, and experts that are published one by one and held in one tensor. `LazyTensor` lets its conversions say where each
part of a tensor comes from, without reading any.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from titanplans.errors import ModelError
from titanplans.modeling.own import is_own
from titanplans.weights.lazy import LazyTensor
from titanplans.weights.older import older_conversions


def from_published(
    model: PreTrainedModel, published: Mapping[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return the tensors of a published folder by the names of the module tree, and those that the model has not.

    Args:
        model: as its own constructor makes it, on meta: classes and names count, not values. Not a split one, of which
            FSDP2 has renamed the classes.
        published: name in the folder -> tensor.

    Returns:
        Name in the module tree -> tensor, read through transformers' conversions; a tied parameter has the name by which
        the folder has it. Published names for which the model has no place, but for those that its class says to ignore.

    Raises:
        ModelError: tensors that are parts of one don't fit together, or two are one of the model.
    """
    names: dict[str, Any] = model.state_dict()
    if is_own(model.config):
        known = {name: tensor for name, tensor in published.items() if name in names}
        return known, [name for name in published if name not in names]
    conversions = get_model_conversion_mapping(model)
    conversions += older_conversions(model.config.model_type, type(model).__module__, published)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    tensors: dict[str, LazyTensor] = {}
    collected: dict[str, WeightConverter] = {}
    unexpected = []

    def add(target: str, tensor: LazyTensor) -> None:
        if target in tensors:
            raise ModelError(
                f"{tensors[target].name} and {tensor.name} are both {target} of this model: remove one of them from "
                "the folder"
            )
        tensors[target] = tensor

    for name in sorted(published, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, names)
        if target not in names and name in names:  # it was renamed though it is right
            target, pattern = rename_source_key(name, [], [], prefix, names)
        if target not in names:
            unexpected.append(name)
        elif pattern is None:
            add(target, published[name])
        else:
            converter = collected.setdefault(target, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(target, name, pattern, published[name])  # pyrefly: ignore[bad-argument-type]
    for target, converter in collected.items():
        converted: dict[str, Any] = converter.convert(target, model=model, config=model.config)
        for name, made in converted.items():
            add(name, made[0] if isinstance(made, list) else made)
    ignored = _ignored(model)
    return tensors, [name for name in unexpected if not any(re.search(each, name) for each in ignored)]


def to_published(model: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return a model's tensors by their published names: the way back, as `save_pretrained` goes it.

    Args:
        model: as for `from_published`.
        tensors: name in the module tree -> tensor.
    """
    if is_own(model.config):
        return dict(tensors)
    return revert_weight_conversion(model, dict(tensors))  # pyrefly: ignore[bad-argument-type,bad-return]


def _ignored(model: PreTrainedModel) -> set[str]:
    """Patterns of published names to ignore: those of the model's class, and buffers that old releases stored."""
    ignored = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        ignored.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        ignored.add(r"(^|\.)position_ids$")
    return ignored
