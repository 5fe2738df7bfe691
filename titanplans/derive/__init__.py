"""Derive a plan from the dataflow of a model: start at `derive`.

`probe` finds which rows of which weights each head, or slice of a width, uses; `analyse` does so for every region of a
model; `write` writes the class; `search` proves it.
"""

from titanplans.derive.search import Derived, derive
from titanplans.derive.small_configs import default_config, small_configs

__all__ = ["Derived", "default_config", "derive", "small_configs"]
