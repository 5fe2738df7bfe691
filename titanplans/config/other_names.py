"""Options of other projects and of earlier releases, as other_names.toml has them: under today's name, or refused."""

from importlib.resources import files
from typing import Any, NamedTuple

import tomli


class Renamed(NamedTuple):
    """Today's key, and whose name the old one is."""

    to: str
    of: str


class Refused(NamedTuple):
    """A key that is not honoured."""

    off: tuple[Any, ...]
    """Values that are accepted, since they ask for nothing."""
    reason: str
    """Why, and what to do instead."""


_TABLES = tomli.loads(files("titanplans.config").joinpath("other_names.toml").read_text(encoding="utf-8"))

RENAMED = {old: Renamed(to, of) for of, names in _TABLES["renamed"].items() for old, to in names.items()}
"""Today's key by the old one: torchtitan's, flame's and NeMo Automodel's."""

ELSEWHERE = {name: ours for ours, names in _TABLES["elsewhere"].items() for name in names}
"""Today's key by what other tools call it, without its section."""

AUTOMODEL: dict[str, str] = _TABLES["automodel"]
"""Today's option of a strategy by that of NeMo Automodel."""

REQUIRES_SWITCH = {key: switch for switch, keys in _TABLES["requires_switch"].items() for key in keys}
"""The switch without which a key does nothing, by key."""

AUTOMODEL_WORDS: dict[str, list[str]] = _TABLES["automodel_words"]
"""Today's words for false and true, by NeMo Automodel's option."""

REFUSED = {
    key: Refused(tuple(off), row["reason"]) for row in _TABLES["refused"] for key, off in row["keys"].items()
}
"""Refusals by key."""

MODELS_OF_OTHERS: dict[str, dict[str, list[str]]] = _TABLES["models"]
"""Name and flavor of the same model here, by torchtitan's name and flavor."""
