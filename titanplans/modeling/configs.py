"""From a name and a flavor, or from a config.json, to a `transformers` config object.

The sizes live in `titanplans.modeling.families`. Nothing here reaches for the network: a model that is not in the
installed `transformers` or `fla` is refused, remote code included.
"""

import copy
import difflib
import importlib
import inspect
import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from titanplans.errors import ModelError
from titanplans.modeling.families import FAMILIES

# What a config class raises for a value it does not take: its own checks, and those of the typed
# config dataclasses of transformers 5.
_BAD_VALUE = (TypeError, ValueError, StrictDataclassError)


def available() -> dict[str, tuple[str, ...]]:
    """The named models and their flavors: `{"gla": ("debug", "340M", ...), ...}`."""
    return {name: tuple(family.flavors) for name, family in FAMILIES.items()}


def load_config(name: str, flavor: str, **overrides: Any) -> PretrainedConfig:
    """The config of a named model, with `overrides` of its fields.

    Of a model with a text and a vision config (gemma3), a field of the text config is given by its own name, and
    reaches the outer config too where both have it; `text_config={...}` and `vision_config={...}` change the
    fields that they name and leave the others.

    >>> load_config("gla", "debug", vocab_size=8192).vocab_size
    8192
    >>> config = load_config("gemma3", "debug", vocab_size=8192, vision_config={"num_hidden_layers": 1})
    >>> config.text_config.vocab_size, config.vision_config.num_hidden_layers
    (8192, 1)

    Raises:
        ModelError: unknown `name`, `flavor` or field, or a value the config class refuses.
    """
    if name not in FAMILIES:
        raise ModelError(
            f"model {name!r} is unknown; available: {', '.join(FAMILIES)}{_nearest(name, FAMILIES)} "
            "(any other Hugging Face model: give its config.json)"
        )
    family = FAMILIES[name]
    if flavor not in family.flavors:
        raise ModelError(
            f"model {name!r} has no flavor {flavor!r}; available: {', '.join(family.flavors)}"
            f"{_nearest(flavor, family.flavors)}"
        )
    module, _, class_name = family.config_class.rpartition(".")
    # Only when one is asked for: `fla.models` imports Triton and every FLA model.
    config_class: type[PretrainedConfig] = getattr(importlib.import_module(module), class_name)
    # Copies throughout: config classes write defaults into the mappings they are given.
    config = config_class(**copy.deepcopy(dict(family.flavors[flavor])))
    values = _overridden(config, copy.deepcopy(dict(family.flavors[flavor])), copy.deepcopy(overrides))
    try:
        return config_class(**values)
    except _BAD_VALUE as error:
        raise ModelError(f"model {name!r}, flavor {flavor!r}, {overrides}: {_line(error)}") from error


def load_config_file(path: str | PathLike[str]) -> PretrainedConfig:
    """The config in a Hugging Face config.json, or in the folder that holds one.

    Every `model_type` of the installed `transformers` and `fla` is known.

    Raises:
        ModelError: no such file, not a JSON object, `model_type` missing or unknown, or a value that
            the config class refuses.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"model config {str(path)!r} can't be read: {error.strerror}") from error
    except ValueError as error:  # JSONDecodeError names line and column; UnicodeDecodeError the byte
        raise ModelError(f"model config {str(path)!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(
            f"model config {str(path)!r} must hold a JSON object, it holds a {type(values).__name__}"
        )
    if "model_type" not in values:
        raise ModelError(f'model config {str(path)!r} has no \'model_type\', e.g. "model_type": "gla"')
    import fla.models  # noqa: F401  # registers FLA's model types with transformers

    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"model config {str(path)!r}: model_type {model_type!r} is in neither the installed transformers "
            f"nor fla{_nearest(str(model_type), CONFIG_MAPPING.keys())}; code from a hub is never run"
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except _BAD_VALUE as error:
        raise ModelError(f"model config {str(path)!r}: {_line(error)}") from error


def _overridden(
    config: PretrainedConfig, values: dict[str, Any], overrides: dict[str, Any]
) -> dict[str, Any]:
    """`values`, the fields that made `config`, with `overrides` put where they belong."""
    fields, nested = _fields(config), list(config.sub_configs)
    text = config.get_text_config()
    text_fields = [] if text is config else _fields(text)
    for key, value in overrides.items():
        if key in nested and isinstance(value, dict):
            inner = getattr(config, key)
            _check_fields(inner, value, _fields(inner))
            values[key] = values[key] | value
            continue
        _check_fields(config, [key], fields + [field for field in text_fields if field not in fields])
        if key in fields:
            values[key] = value
        if key in text_fields:
            values["text_config"][key] = value
    return values


def _check_fields(config: PretrainedConfig, keys: Iterable[str], fields: list[str]) -> None:
    for key in keys:
        if key not in fields:
            raise ModelError(
                f"{type(config).__name__} has no field {key!r}{_nearest(key, fields)}; its fields: {', '.join(fields)}"
            )


def _fields(config: PretrainedConfig) -> list[str]:
    """The fields that describe the architecture: not those that every config has (dtype, labels, outputs)."""
    common = inspect.signature(PretrainedConfig).parameters
    return [
        key for key in inspect.signature(type(config)).parameters if key not in common and key != "kwargs"
    ]


def _nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if some known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _line(error: Exception) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split())
