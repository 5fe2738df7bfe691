"""The named models: which config class, and the fields of each flavor that differ from its defaults.

Only figures live here, a file for each kin; `titanplans.modeling.configs` turns them into config objects. A new family is an
entry in `FAMILIES`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from titanplans.modeling.families.family import Family
from titanplans.modeling.families.fla import GLA, TRANSFORMER
from titanplans.modeling.families.gemma import GEMMA3, GEMMA3_TEXT
from titanplans.modeling.families.llama import LLAMA, MISTRAL
from titanplans.modeling.families.qwen import QWEN2, QWEN3

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "transformer": TRANSFORMER,
        "gla": GLA,
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "gemma3_text": GEMMA3_TEXT,
        "gemma3": GEMMA3,
    }
)
