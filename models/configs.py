"""From a name and a flavor, or from a config.json, to a `transformers` config object.

The sizes live in `models.flavors`. Nothing here reaches for the network: a model that is not in the
installed `transformers` or `fla` is refused, remote code included.
"""

import difflib
import inspect
import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from models.errors import ModelError
from models.flavors import FAMILIES

# What a config class raises for a value it does not take: its own checks, and those of the typed
# config dataclasses of transformers 5.
_BAD_VALUE = (TypeError, ValueError, StrictDataclassError)


def available() -> dict[str, tuple[str, ...]]:
    """The named models and their flavors: `{"gla": ("debug", "340M", ...), ...}`."""
    return {name: tuple(family.flavors) for name, family in FAMILIES.items()}


def load_config(name: str, flavor: str, **overrides: Any) -> PretrainedConfig:
    """The config of a named model, with `overrides` of its fields.

    >>> load_config("gla", "debug", vocab_size=8192).vocab_size
    8192

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
    import fla.models  # imports Triton and every FLA model: only when one is asked for

    config_class: type[PretrainedConfig] = getattr(fla.models, family.config_class)
    fields = [p for p in inspect.signature(config_class).parameters if p != "kwargs"]
    for key in overrides:
        if key not in fields:
            raise ModelError(
                f"{config_class.__name__} has no field {key!r}{_nearest(key, fields)}; "
                f"its fields: {', '.join(fields)}"
            )
    try:
        return config_class(**(dict(family.flavors[flavor]) | overrides))
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


def _nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if some known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _line(error: Exception) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split())
