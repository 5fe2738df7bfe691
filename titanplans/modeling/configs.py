"""Create a `transformers` config from a model's name and flavor (`load_config`), or from a config.json (`load_config_file`).

Models that are not in the installed `transformers` or `fla`, and remote code, are refused. The network is used only for a
config.json that a repository of the Hugging Face Hub names.
"""

import copy
import importlib
import inspect
import json
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from titanplans.config.families import Family, families, find_flavor
from titanplans.errors import ModelError, did_you_mean
from titanplans.extras import as_missing_library, is_installed, missing_library
from titanplans.hub import local_folder
from titanplans.modeling.config_values import check_values, unread_keys
from titanplans.modeling.user_model import user_model_config
from titanplans.text import show

# Errors that a config class raises for a wrong value: in its own checks, in the typed config dataclasses of transformers 5,
# and when it computes one field from another.
_BAD_VALUE = (
    *(TypeError, ValueError, AssertionError, StrictDataclassError),
    *(ArithmeticError, AttributeError, LookupError),
)


def available() -> dict[str, tuple[str, ...]]:
    """Return the named models and their flavors: `{"gla": ("debug", "340M", ...), ...}`."""
    return {name: tuple(family.flavors) for name, family in families().items()}


def load_config(name: str, flavor: str, **overrides: Any) -> PretrainedConfig:
    """Return the config of a named model, with `overrides` of its fields.

    If the config has nested text and vision configs (gemma3), a field of the text config can be overridden with its plain
    name, which also overrides it in the outer config if both configs have it. `text_config={...}` and `vision_config={...}`
    override the named fields and keep the other fields.

    >>> load_config("gla", "debug", vocab_size=8192).vocab_size
    8192
    >>> config = load_config("gemma3", "debug", vocab_size=8192, vision_config={"num_hidden_layers": 1})
    >>> config.text_config.vocab_size, config.vision_config.num_hidden_layers
    (8192, 1)

    Raises:
        ModelError: `name`, `flavor` or a field is unknown, or the config class refuses a value.
    """
    family = find_flavor(name, flavor)
    fields = family.flavors[flavor]
    if family.own_class is not None:
        return user_model_config(family.own_class, fields | overrides, f"{family.source}, flavor {flavor!r}")
    config_class, source = _config_class(family), f"{family.source}, flavor {flavor!r}"
    # `_construct` copies the fields: config classes write defaults into nested mappings.
    config = _construct(config_class, fields, source)
    try:
        _check_fields(config, fields, also=family.undeclared)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from error
    values = _overridden(config, fields, overrides)
    return _construct(config_class, values, f"model {name!r}, flavor {flavor!r}, {overrides}")


def load_config_file(path: str | PathLike[str]) -> PretrainedConfig:
    """Return the config in a Hugging Face config.json, or in a folder or a repository of the Hub that has one.

    Every `model_type` of the installed `transformers` and `fla` is supported.

    Args:
        path: the file, the folder, or "owner/name[@revision]", if there is no such file or folder.

    Raises:
        ConfigError: the repository can't be downloaded; see `titanplans.hub.download`.
        ModelError: the file does not exist or is not a JSON object, `model_type` is missing or unknown, a value has a wrong
            type or is out of range, the model is quantised, or the config class refuses a value.
    """
    where = f"model config {str(path)!r}"
    path = local_folder(str(path), where)
    try:
        if (path := Path(path)).is_dir():
            path = path / "config.json"
            where = f"model config {str(path)!r}"
        if path.exists() and not path.is_file():
            raise ModelError(f"{where} is not a file")  # reading a pipe would block
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except OSError as error:
        raise ModelError(f"{where} can't be read: {error.strerror}") from error
    # JSONDecodeError names line and column, UnicodeDecodeError the byte.
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{where} must hold a JSON object, but holds a {type(values).__name__}")
    if "model_type" not in values:
        raise ModelError(f'{where} has no \'model_type\', e.g. "model_type": "gla"')
    if is_installed("fla"):
        import fla.models  # noqa: F401  # registers FLA's model types with transformers

    model_type = values["model_type"]
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        if not is_installed("fla"):
            raise missing_library(
                "fla", f"{where}: model_type {model_type!r}, which transformers does not have,"
            )
        raise ModelError(
            f"{where}: model_type {model_type!r} is in neither the installed transformers "
            f"nor fla; {did_you_mean(str(model_type), CONFIG_MAPPING.keys(), 'code from a hub is never run')}"
        )
    check_values(values, CONFIG_MAPPING[model_type], where)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(values))
    except _BAD_VALUE as error:
        raise ModelError(f"{where}: {_one_line(error)}") from error
    for key, owner in unread_keys(values, config):
        _log_once(
            f"{where}: {key} is not a field of {type(owner).__name__}, and has no effect unless the model's "
            f"code reads it; {did_you_mean(key, _fields(owner), 'remove it if it does not')}"
        )
    return config


def _special_float(values: dict[str, Any]) -> Any:
    """Return the number that transformers writes as `{"__float__": "Infinity"}`, or any other object unchanged."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def adjusted(config: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """Return a copy of `config` with `overrides` of its fields or its text config's; nested tables are merged.

    Raises:
        ModelError: a field does not exist, or its value is refused.
    """
    text = config.get_text_config()
    fields = {key: _merged(getattr(text, key, None), value) for key, value in overrides.items()}
    try:
        check_values(overrides, type(text), "its table")
        return type(config).from_dict(_overridden(config, config.to_dict(), fields))
    except _BAD_VALUE as error:
        raise ModelError(f"model.config_overrides = {show(overrides)}: {_one_line(error)}") from error


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new


@cache
def _log_once(note: str) -> None:
    """Log `note` once per process. A forked process does not log again what its parent has logged."""
    logging.getLogger(__name__).info(note)


def _config_class(family: Family) -> type[PretrainedConfig]:
    assert family.config_class is not None
    module, _, name = family.config_class.rpartition(".")
    try:
        # Imported here: `fla.models` imports Triton and every FLA model.
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and (missing := as_missing_library(error, family.config_class)):
            raise missing from error
        raise ModelError(
            f"{family.source}: config_class = {family.config_class!r} can't be imported: {error}"
        ) from error


def _construct(config_class: type[PretrainedConfig], fields: dict[str, Any], what: str) -> PretrainedConfig:
    try:
        return config_class(**copy.deepcopy(fields))
    except _BAD_VALUE as error:
        raise ModelError(f"{what}: {_one_line(error)}") from error


def _overridden(
    config: PretrainedConfig, fields: dict[str, Any], overrides: dict[str, Any]
) -> dict[str, Any]:
    """Apply `overrides`, in the outer or the nested configs, to the `fields` from which `config` was constructed."""
    text = config.get_text_config()
    text_fields = [] if text is config else _fields(text)
    values = dict(fields)
    for key, value in overrides.items():
        if key in config.sub_configs and isinstance(value, Mapping):
            _check_fields(getattr(config, key), value)
            values[key] = {**values.get(key, {}), **value}
            continue
        _check_fields(config, {key: value}, also=text_fields)
        if key in _fields(config):
            values[key] = value
        if key in text_fields:
            values["text_config"] = {**values.get("text_config", {}), key: value}
    return values


def _check_fields(config: PretrainedConfig, fields: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Refuse keys that are neither in `also` nor fields of `config`; a nested table is checked against the nested config."""
    allowed = list(dict.fromkeys([*_fields(config), *also]))
    for key, value in fields.items():
        if key not in allowed:
            raise ModelError(f"{type(config).__name__} has no field {key!r}; {did_you_mean(key, allowed)}")
        if key in config.sub_configs and isinstance(value, Mapping):
            _check_fields(getattr(config, key), value, also)


def _fields(config: PretrainedConfig) -> list[str]:
    """Return the fields that the architecture adds to the fields that every config has (dtype, labels, outputs)."""
    common, fields = inspect.signature(PretrainedConfig).parameters, []
    for kind in type(config).__mro__:
        if kind is PretrainedConfig:
            break
        parameters = inspect.signature(kind).parameters
        fields += [key for key in parameters if key not in common and key != "kwargs"]
        if "kwargs" not in parameters:
            break  # with **kwargs a class also takes the fields of its base class
    return list(dict.fromkeys(fields))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
