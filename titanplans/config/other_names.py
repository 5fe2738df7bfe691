"""Options of other projects and of earlier releases, from other_names.toml: renamed here, or refused with a reason."""

from importlib.resources import files
from typing import Any, NamedTuple

import tomli


class Renamed(NamedTuple):
    """An option of another project, and the key that it is renamed to."""

    to: str
    """The key here."""
    of: str
    """The project or release that has the other name."""


class Refused(NamedTuple):
    """A key that is refused, unless its value has no effect."""

    off: tuple[Any, ...]
    """Values that are accepted, since they have no effect."""
    reason: str
    """Why the key is refused, and what to do instead."""


_TABLES = tomli.loads(files("titanplans.config").joinpath("other_names.toml").read_text(encoding="utf-8"))

RENAMED = {old: Renamed(to, of) for of, names in _TABLES["renamed"].items() for old, to in names.items()}
"""Maps a key of torchtitan, flame or NeMo Automodel to the key here."""

ELSEWHERE = {name: ours for ours, names in _TABLES["elsewhere"].items() for name in names}
"""Maps an option of other tools, which has no section, to the key of a job here."""

AUTOMODEL: dict[str, str] = _TABLES["automodel"]
"""Maps NeMo Automodel's name of an option to the option of a strategy here."""

REQUIRES_SWITCH = {key: switch for switch, keys in _TABLES["requires_switch"].items() for key in keys}
"""Maps a key to the switch without which the key has no effect."""

AUTOMODEL_WORDS: dict[str, list[str]] = _TABLES["automodel_words"]
"""Maps a boolean option of NeMo Automodel to the two values here that stand for false and true."""

REFUSED = {
    key: Refused(tuple(off), row["reason"]) for row in _TABLES["refused"] for key, off in row["keys"].items()
}
"""Refused keys."""

MODELS_OF_OTHERS: dict[str, dict[str, list[str]]] = _TABLES["models"]
"""Maps torchtitan's name and flavor of a model to the name and flavor here."""
