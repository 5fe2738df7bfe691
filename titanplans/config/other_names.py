"""Names of options in other projects and in earlier releases, from other_names.toml: renamed, or refused with a reason."""

from importlib.resources import files
from typing import Any, NamedTuple

import tomli


class Renamed(NamedTuple):
    """The key here, and the project or release of the other name."""

    to: str
    of: str


class Refused(NamedTuple):
    """A key that is not honoured."""

    off: tuple[Any, ...]
    """Values that are accepted, since they have no effect."""
    reason: str
    """Why, and what to do instead."""


_TABLES = tomli.loads(files("titanplans.config").joinpath("other_names.toml").read_text(encoding="utf-8"))

RENAMED = {old: Renamed(to, of) for of, names in _TABLES["renamed"].items() for old, to in names.items()}
"""The key here by the name in torchtitan, flame or NeMo Automodel."""

ELSEWHERE = {name: ours for ours, names in _TABLES["elsewhere"].items() for name in names}
"""The key here by the name that other tools use, without a section."""

AUTOMODEL: dict[str, str] = _TABLES["automodel"]
"""The option of a strategy by its name in NeMo Automodel."""

REQUIRES_SWITCH = {key: switch for switch, keys in _TABLES["requires_switch"].items() for key in keys}
"""By key, the switch without which it has no effect."""

AUTOMODEL_WORDS: dict[str, list[str]] = _TABLES["automodel_words"]
"""By NeMo Automodel's boolean option, the values here for false and true."""

REFUSED = {
    key: Refused(tuple(off), row["reason"]) for row in _TABLES["refused"] for key, off in row["keys"].items()
}
"""Refusals by key."""

MODELS_OF_OTHERS: dict[str, dict[str, list[str]]] = _TABLES["models"]
"""Name and flavor of the same model here, by torchtitan's name and flavor."""
