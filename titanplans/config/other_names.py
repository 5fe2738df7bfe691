"""Options of other projects and of earlier releases, from other_names.toml: renamed here, or refused with a reason."""

from importlib.resources import files
from typing import Any, NamedTuple

import tomli


class Renamed(NamedTuple):
    """What an option of another project is called here."""

    to: str
    """The key here."""
    of: str
    """The project or release that has the other name."""


class Refused(NamedTuple):
    """A key that is refused, unless its value has no effect."""

    off: tuple[Any, ...]
    """Values that are accepted, since they have no effect."""
    reason: str
    """Why it is refused, and what to do instead."""


_TABLES = tomli.loads(files("titanplans.config").joinpath("other_names.toml").read_text(encoding="utf-8"))

RENAMED = {old: Renamed(to, of) for of, names in _TABLES["renamed"].items() for old, to in names.items()}
"""The key here, by its name in torchtitan, flame or NeMo Automodel."""

ELSEWHERE = {name: ours for ours, names in _TABLES["elsewhere"].items() for name in names}
"""The key here, by the name (without a section) that other tools use."""

AUTOMODEL: dict[str, str] = _TABLES["automodel"]
"""The option of a strategy, by its name in NeMo Automodel."""

REQUIRES_SWITCH = {key: switch for switch, keys in _TABLES["requires_switch"].items() for key in keys}
"""The switch without which a key has no effect, by key."""

AUTOMODEL_WORDS: dict[str, list[str]] = _TABLES["automodel_words"]
"""The values here for false and true, by the name of NeMo Automodel's boolean option."""

REFUSED = {
    key: Refused(tuple(off), row["reason"]) for row in _TABLES["refused"] for key, off in row["keys"].items()
}
"""Refused keys."""

MODELS_OF_OTHERS: dict[str, dict[str, list[str]]] = _TABLES["models"]
"""Name and flavor of a model here, by torchtitan's name and flavor of the same model."""
