"""TOML in and out: a file to nested dicts, with the place of a syntax error; a job to text that reads back."""

import json
from pathlib import Path
from typing import Any

import tomli

from titanplans.errors import ConfigError


def read_toml(path: Path, what: str = "job file") -> dict[str, Any]:
    """Parse a TOML file, which is called `what` in messages.

    Raises:
        ConfigError: no such file (with those beside it), not text, or not TOML (with line and column).
    """
    if not path.is_file():
        reason = f"is a folder, not a {what}" if path.is_dir() else f"no such {what}"
        folder = path if path.is_dir() else path.parent
        beside = sorted(str(other) for other in folder.glob("*.toml"))
        raise ConfigError(f"{path}: {reason}" + (f"; there are {', '.join(beside)}" if beside else ""))
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}), so not TOML") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}") from None


def write_toml(tables: dict[str, dict[str, Any]]) -> str:
    """Write tables, by dotted name, as TOML; None values are left out, which TOML has no word for."""
    blocks = []
    for name, table in tables.items():
        lines = [f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None]
        blocks.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def toml_value(value: Any) -> str:
    """Write one value as TOML that reads back as an equal one."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_string(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which only JSON lets through.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
