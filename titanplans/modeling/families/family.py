"""What a named model is: its config class and its flavors. The figures are in the other files of this room."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A named model: the config class that builds it and its flavors."""

    config_class: str
    """Module and name of the class, "transformers.LlamaConfig"; a string, so that a list of names imports no library."""
    flavors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Flavor -> config fields that differ from the class's defaults; nested configs are nested mappings."""
