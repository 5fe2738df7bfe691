"""The named models: which config class, and the fields of each flavor that differ from its defaults.

Only figures live here; `models.configs` turns them into config objects. Every size but `debug` is one
that the authors of flash-linear-attention published:

    flame   github.com/fla-org/flame, commit e11e7be, configs/
    fla     github.com/fla-org/flash-linear-attention, commit bc3b101, legacy/training/configs/

Fields equal to the defaults of `GLAConfig` and `TransformerConfig` in flash-linear-attention 0.6 are
left out. The published configs were written for a vocabulary of 32,000.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Family:
    """A named model: the config class that builds it and its flavors."""

    config_class: str
    """Name of a class of `fla.models`; a string, so that a list of names does not import a library."""
    flavors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Flavor -> config fields."""


# Ours: every degree 1, 2, 4, 8 divides the heads, the MLP (512 wide) and the vocabulary of the
# tokenizer that comes with the project; quick on two CPU cores.
_DEBUG = {"hidden_size": 128, "num_hidden_layers": 4, "num_heads": 8, "vocab_size": 4096}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "transformer": Family(
            config_class="TransformerConfig",
            flavors={
                "debug": _DEBUG,
                # flame, transformer_340M.json
                "340M": {"hidden_size": 1024, "num_heads": 16, "max_position_embeddings": 8192},
                # flame, transformer_1B.json; the released fla-hub/transformer-1.3B-100B has this size
                "1.3B": {"hidden_size": 2048, "num_heads": 32, "max_position_embeddings": 8192},
                # flame, transformer_7B.json
                "7B": {
                    "hidden_size": 4096,
                    "num_hidden_layers": 32,
                    "num_heads": 32,
                    "num_kv_heads": 8,
                    "intermediate_size": 14336,
                },
            },
        ),
        "gla": Family(
            config_class="GLAConfig",
            flavors={
                # Key heads as wide as value heads (16): a Triton dot product needs 16 on each side.
                "debug": _DEBUG | {"expand_k": 1.0},
                # flame, gla_340M.json
                "340M": {"hidden_size": 1024, "num_heads": 4},
                # fla, gla_1B.json; the released fla-hub/gla-1.3B-100B
                "1.3B": {"hidden_size": 2048, "num_heads": 4},
                # flame, gla_7B.json
                "7B": {
                    "hidden_size": 4096,
                    "num_hidden_layers": 32,
                    "num_heads": 16,
                    "intermediate_size": 11008,
                },
            },
        ),
    }
)
