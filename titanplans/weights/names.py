"""Published names of weights, and those of the module tree: transformers' own conversions, both ways.

Most names are the same. What differs is in transformers' table (`transformers.conversion_mapping`): renamed modules and
towers, and experts that are published one by one and held in one tensor. `LazyTensor` lets its conversions say where each
part of a tensor comes from, without reading any. transformers' table has no models of FLA, and FLA's own conversions run
in its `load_state_dict` alone, or in scripts: `OLDER` has what its older releases stored differently. A release that
computes differently (norms over all heads, `norm_first`) can't be converted: its shapes are refused.
"""

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from titanplans.errors import ModelError
from titanplans.modeling.own import is_own
from titanplans.weights.lazy import LazyTensor


def from_published(
    model: PreTrainedModel, published: Mapping[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], list[str], list[str]]:
    """Return the tensors of a published folder by the names of the module tree, and those that the model has not.

    Args:
        model: as its own constructor makes it, on meta: classes and names count, not values. Not a split one, of which
            FSDP2 has renamed the classes.
        published: name in the folder -> tensor.

    Returns:
        Name in the module tree -> tensor, read through transformers' conversions; a tied parameter has the name by which
        the folder has it. Published names for which the model has no place. Those of them that its class leaves out: layers
        of multi-token prediction, or a head of another task.

    Raises:
        ModelError: tensors that are parts of one don't fit together, or two are one of the model.
    """
    names: dict[str, Any] = model.state_dict()
    if is_own(model.config):
        known = {name: tensor for name, tensor in published.items() if name in names}
        return known, [name for name in published if name not in names], []
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
    buffers, left_out = _old_buffers(model), model._keys_to_ignore_on_load_unexpected or ()
    unexpected = [name for name in unexpected if not any(re.search(each, name) for each in buffers)]
    return (
        tensors,
        unexpected,
        [name for name in unexpected if any(re.search(each, name) for each in left_out)],
    )


def to_published(model: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return a model's tensors by their published names: the way back, as `save_pretrained` goes it.

    Args:
        model: as for `from_published`.
        tensors: name in the module tree -> tensor.
    """
    if is_own(model.config):
        return dict(tensors)
    return revert_weight_conversion(model, dict(tensors))  # pyrefly: ignore[bad-argument-type,bad-return]


def _old_buffers(model: PreTrainedModel) -> list[str]:
    """Return patterns of buffers that old releases stored and the model computes."""
    buffers = [name for name, _ in model.named_buffers()]
    patterns = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    return [pattern for end, pattern in patterns.items() if any(name.endswith(end) for name in buffers)]


class Older(NamedTuple):
    """An older format, and how its folders are recognised."""

    lacks: str
    """A part of a name that such a folder does not have."""

    conversion: WeightTransform

    models: tuple[str, ...] = ()
    """Their `model_type`; () for all of FLA."""


class _Mixes(Chunk):
    """Splits RWKV-7's weights of the token shift, [6, hidden], into six tensors [1, 1, hidden]."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        converted = super().convert(input_dict, *args, **kwargs)
        return {name: chunk.unsqueeze(0) for name, chunk in converted.items()}


_GATE, _UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"
OLDER = (
    # fla-org/flash-linear-attention b48ca31d (February 2025) split one matrix into two, the gate's rows first.
    Older(_UP, WeightConverter([_GATE], [_GATE, _UP], [Chunk(dim=0)])),
    # 2d251bb3 (April 2025): g_proj is the output gate since.
    Older(".f_proj.", WeightRenaming(r"\.attn\.g_proj\.", ".attn.f_proj."), ("forgetting_transformer",)),
    # 6b673e6b (April 2025).
    Older(
        "attn.x_r",
        WeightConverter(["attn.x_x"], [f"attn.x_{each}" for each in "rwkvag"], [_Mixes(dim=0)]),
        ("rwkv7",),
    ),
    # As in the models' load hooks: the name in state-spaces' own folders.
    Older(
        "backbone.embeddings.",
        WeightRenaming(r"^backbone\.embedding\.", "backbone.embeddings."),
        ("mamba", "mamba2", "mamba3", "log_linear_mamba2"),
    ),
)


def older_conversions(model_type: str, module: str, published: Collection[str]) -> list[WeightTransform]:
    """Return the conversions that a folder with these names needs in addition to transformers' own.

    Args:
        model_type: the config's.
        module: where the model's class is from.
        published: names in the folder.
    """
    if not module.startswith("fla."):
        return []
    return [
        older.conversion
        for older in OLDER
        if model_type in (older.models or (model_type,))
        and not any(older.lacks in name for name in published)
    ]
