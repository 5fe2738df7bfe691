"""Check the values of a config.json before a config class is constructed. Start at `check_values`.

Config classes of `transformers` check the types of their fields, and config classes of `fla` do not. Neither library checks
ranges. Without this check a wrong value would fail in a model's constructor, with an error that does not name the field.
"""

import inspect
import json
import re
import typing
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

import torch
from transformers import PretrainedConfig

from titanplans.config.values import Constraint, Mismatch, describe, fit
from titanplans.errors import ModelError

_MOST = 2**31 - 1
"""The largest size, since many kernels have 32-bit indices."""

_LAYERS = 10_000

_RULES = {
    r"num_hidden_layers|n_layers?": Constraint(f"from 1 to {_LAYERS}", lambda value: 1 <= value <= _LAYERS),
    r"vocab_size|hidden_size|intermediate_size|d_model|n_embd|(num_attention|num_key_value|num_kv|num|n)_heads?|head_dim|"
    r"(patch|image|conv)_size|mm_tokens_per_image|max_position_embeddings|n_positions": Constraint(
        f"from 1 to {_MOST}", lambda value: 1 <= value <= _MOST
    ),
    r".*_(size|dim|heads|layers|rank|groups|experts)|(num|n)_.*": Constraint(
        f"from 0 to {_MOST}", lambda value: 0 <= value <= _MOST
    ),
    r"expand(_[kv])?|(hidden|mlp)_ratio|rope_theta|rope_local_base_freq": Constraint(
        "above 0", lambda value: value > 0
    ),
    r".*_eps|epsilon|initializer_range|.*_std": Constraint("at least 0", lambda value: value >= 0),
    r".*(dropout|pdrop)": Constraint("from 0 to 1", lambda value: 0 <= value <= 1),
}
"""Ranges of numbers, by patterns of field names that many model families use. The first match counts."""

_NO_FIELD = inspect.Parameter("_", inspect.Parameter.KEYWORD_ONLY)
"""Used in place of the field of an unknown key."""


def check_values(values: Mapping[str, Any], config_class: type[PretrainedConfig], where: str) -> None:
    """Refuse values of a wrong type or out of range, and quantised models.

    Args:
        values: the content of the config.json.
        config_class: the class of its model_type.
        where: a description of the file, for errors.

    Raises:
        ModelError: there is such a value; the message names the key of the first one, and the expected type or range.
    """
    _check_table(values, config_class, where, "")


def _check_table(values: Mapping[str, Any], config_class: Any, where: str, prefix: str) -> None:
    fields = inspect.signature(config_class).parameters if config_class is not None else {}
    nested = config_class.sub_configs if config_class is not None else {}
    if (quantised := values.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise ModelError(
            f"{where}: {prefix}quantization_config (quant_method = {_json(method)}): a quantised model can't be trained: "
            "take the config.json of the model that was quantised, or remove quantization_config to train new weights in "
            "training.dtype"
        )
    for key, value in values.items():
        field_text = f"{where}: {prefix}{key} = {_json(value)}"
        field = fields.get(key, _NO_FIELD)
        if isinstance(value, Mapping) and not _is_number(field.annotation):
            inner = nested.get(key)  # AutoConfig, if any class is allowed
            is_config = isinstance(inner, type) and issubclass(inner, PretrainedConfig)
            _check_table(value, inner if is_config else None, where, f"{prefix}{key}.")
        elif key in ("dtype", "torch_dtype"):
            if value is not None and not isinstance(getattr(torch, str(value), None), torch.dtype):
                raise ModelError(f'{field_text}: expected the name of a type of torch, such as "bfloat16"')
        elif value != field.default:  # a class's default may violate the rules
            _check_value(key, value, field.annotation, field_text)


def _check_value(key: str, value: Any, hint: Any, field_text: str) -> None:
    rule = next((rule for names, rule in _RULES.items() if re.fullmatch(names, key)), None)
    if rule is not None and type(value) in (int, float) and not rule.holds(value):  # NaN obeys no rule
        raise ModelError(f"{field_text}: expected a number, {rule.says}")
    if not _is_number(hint) or key.endswith("_token_id"):  # an id is null if there is no such token
        return  # the config class checks this key itself
    try:
        fit(value, hint)
    except Mismatch:
        also = " or null" if NoneType in typing.get_args(hint) else ""
        raise ModelError(f"{field_text}: expected {describe(hint)}{also}") from None


def unread_keys(
    values: Mapping[str, Any], config: PretrainedConfig
) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield each key of a config.json that is not a field of its config class, e.g. a misspelt key, with the config.

    transformers stores them as attributes, which the model's code rarely reads.
    """
    field_names = {*inspect.signature(type(config)).parameters, *config.attribute_map, "auto_map"}
    for key, value in values.items():
        # getattr is not used, since it fails for a size that differs between layers.
        inner = vars(config).get(key)
        if isinstance(inner, PretrainedConfig):
            yield from unread_keys(value or {}, inner)  # null: the class's default
        elif key not in field_names and not key.startswith("_") and not hasattr(type(config), key):
            # Some classes convert a key to other fields, so it is not an attribute. Other keys are used by name, e.g. from
            # `kwargs`.
            is_read = re.search(rf"""['"]{re.escape(key)}['"]""", inspect.getsource(type(config)))
            if key in vars(config) and not is_read:
                yield key, config


def _is_number(hint: Any) -> bool:
    """Whether `hint` is int, float, bool or a union of these, which may include None."""
    members = [member for member in typing.get_args(hint) if member is not NoneType] or [hint]
    return typing.get_origin(hint) is not tuple and all(member in (bool, int, float) for member in members)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
