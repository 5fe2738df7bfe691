"""Convert between the names of tensors in a Hugging Face folder and parameter names, with transformers' conversions.

Most names are the same in both. `transformers.conversion_mapping` has the names that differ: renamed modules and towers,
and experts that are separate tensors in a folder but one tensor in the model. The conversions run on `LazyTensor`s,
without reading values.
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
from titanplans.modeling.user_model import is_user_model
from titanplans.weights.lazy import LazyTensor

_MULTI_TOKEN = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def from_hf_names(
    model: PreTrainedModel, folder_tensors: Mapping[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], list[str], list[str]]:
    """Convert the tensors of a Hugging Face folder to the names of a model's parameters.

    Args:
        model: the unsplit model on meta, whose classes and names are used. (FSDP2 would have renamed the classes.)
        folder_tensors: the tensors by their names in the folder.

    Returns:
        tensors: the tensors by parameter name; they are converted when they are read. A tied parameter has the name that
            the folder uses.
        unexpected: names in the folder that the model does not have.
        ignored: the unexpected names that the model's class ignores: layers of multi-token prediction, or a head for another
            task.

    Raises:
        ModelError: tensors that form one parameter don't fit together, or two tensors are the same parameter.
    """
    names: dict[str, Any] = model.state_dict()
    if is_user_model(model.config):
        same_names = {name: tensor for name, tensor in folder_tensors.items() if name in names}
        return same_names, [name for name in folder_tensors if name not in names], []
    conversions = get_model_conversion_mapping(model)
    conversions += older_conversions(model.config.model_type, type(model).__module__, folder_tensors)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    tensors: dict[str, LazyTensor] = {}
    collected: dict[str, WeightConverter] = {}
    unexpected = []

    def add(target: str, tensor: LazyTensor) -> None:
        if target in tensors:
            raise ModelError(
                f"{tensors[target].name} and {tensor.name} are both named {target} in this model: remove one of them "
                "from the folder"
            )
        tensors[target] = tensor

    for name in sorted(folder_tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, names)
        if target not in names and name in names:
            # A renaming has matched a name that is already a parameter's name.
            target, pattern = rename_source_key(name, [], [], prefix, names)
        if target not in names:
            unexpected.append(name)
        elif pattern is None:
            add(target, folder_tensors[name])
        else:
            converter = collected.setdefault(target, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(target, name, pattern, folder_tensors[name])  # pyrefly: ignore[bad-argument-type]
    for target, converter in collected.items():
        converted: dict[str, Any] = converter.convert(target, model=model, config=model.config)
        for name, value in converted.items():
            add(name, value[0] if isinstance(value, list) else value)
    old_buffers, ignored = _old_buffers(model), model._keys_to_ignore_on_load_unexpected or ()
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in old_buffers)]
    return (
        tensors,
        unexpected,
        [name for name in unexpected if any(re.search(pattern, name) for pattern in ignored)],
    )


def multi_token_names(
    model: PreTrainedModel, unexpected: Collection[str], ignored: Collection[str]
) -> list[str]:
    """Return those names in a Hugging Face folder that belong to layers of multi-token prediction.

    These are names that the model's class ignores and that have a component such as `mtp`; and names of layers after the
    model's last layer, if the class ignores them or the config counts them in `num_nextn_predict_layers`.

    Args:
        model: see `from_hf_names`.
        unexpected, ignored: results of `from_hf_names`.
    """
    if is_user_model(model.config):
        return []
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 0)
    # Some configs have this number under the first name, which transformers maps to the second name.
    predicted = (
        getattr(config, "num_mtp_layers", None) or getattr(config, "num_nextn_predict_layers", None) or 0
    )

    def is_multi_token(name: str) -> bool:
        layer = _LAYER.search(name)
        if layer is not None and layers <= int(layer[1]) < layers + predicted:
            return True
        return name in ignored and (
            _MULTI_TOKEN.search(name) is not None or (layer is not None and int(layer[1]) >= layers)
        )

    return [name for name in unexpected if is_multi_token(name)]


def to_hf_names(model: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Convert a model's tensors to their names in a Hugging Face folder, like `save_pretrained`.

    Args:
        model: see `from_hf_names`.
        tensors: the tensors by parameter name.
    """
    if is_user_model(model.config):
        return dict(tensors)
    return revert_weight_conversion(model, dict(tensors))  # pyrefly: ignore[bad-argument-type,bad-return]


def _old_buffers(model: PreTrainedModel) -> list[str]:
    """Return patterns of buffers that older releases saved, but that the model computes."""
    buffers = [name for name, _ in model.named_buffers()]
    patterns = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    return [pattern for end, pattern in patterns.items() if any(name.endswith(end) for name in buffers)]


class OlderFormat(NamedTuple):
    """A format of an older release of FLA, and how folders in this format are recognised."""

    lacks: str
    """A substring that no name in such a folder has."""

    conversion: WeightTransform

    models: tuple[str, ...] = ()
    """The values of `model_type` to which the format applies; (): all models of FLA."""


class _SplitTokenShift(Chunk):
    """Splits RWKV-7's weight of the token shift, [6, hidden], into six tensors [1, 1, hidden]."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        converted = super().convert(input_dict, *args, **kwargs)
        return {name: chunk.unsqueeze(0) for name, chunk in converted.items()}


_GATE, _UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"
# transformers' table has no models of FLA, and FLA's conversions run only in its `load_state_dict` or in scripts. Weights of
# releases that compute differently (norms over all heads, `norm_first`) can't be converted: their shapes are refused.
OLDER_FORMATS = (
    # fla-org/flash-linear-attention b48ca31d (February 2025) split one matrix into two; the gate's rows came first.
    OlderFormat(_UP, WeightConverter([_GATE], [_GATE, _UP], [Chunk(dim=0)])),
    # Since 2d251bb3 (April 2025) g_proj is the output gate, and the forget gate is f_proj.
    OlderFormat(
        ".f_proj.", WeightRenaming(r"\.attn\.g_proj\.", ".attn.f_proj."), ("forgetting_transformer",)
    ),
    # 6b673e6b (April 2025) split the weights of the token shift.
    OlderFormat(
        "attn.x_r",
        WeightConverter(["attn.x_x"], [f"attn.x_{letter}" for letter in "rwkvag"], [_SplitTokenShift(dim=0)]),
        ("rwkv7",),
    ),
    # Folders of state-spaces have this name, which the models' load hooks rename.
    OlderFormat(
        "backbone.embeddings.",
        WeightRenaming(r"^backbone\.embedding\.", "backbone.embeddings."),
        ("mamba", "mamba2", "mamba3", "log_linear_mamba2"),
    ),
)


def older_conversions(model_type: str, module: str, names: Collection[str]) -> list[WeightTransform]:
    """Return the conversions that a folder needs in addition to transformers' own.

    Args:
        model_type: the config's model type.
        module: the module of the model's class.
        names: the names of the folder's tensors.
    """
    if not module.startswith("fla."):
        return []
    return [
        older.conversion
        for older in OLDER_FORMATS
        if model_type in (older.models or (model_type,)) and not any(older.lacks in name for name in names)
    ]
