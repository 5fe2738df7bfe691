"""flash-linear-attention's own models: `transformer` and `gla`.

Every size but `debug` is one that the authors of flash-linear-attention published:

    flame   github.com/fla-org/flame, commit e11e7be, configs/
    fla     github.com/fla-org/flash-linear-attention, commit bc3b101, legacy/training/configs/

Fields equal to the defaults of `GLAConfig` and `TransformerConfig` in flash-linear-attention 0.6 are
left out. The published configs were written for a vocabulary of 32,000.
"""

from titanplans.modeling.families.family import Family

# Ours: every degree 1, 2, 4, 8 divides the heads, the MLP (512 wide) and the vocabulary of the
# tokenizer that comes with the project; quick on two CPU cores.
_DEBUG = {"hidden_size": 128, "num_hidden_layers": 4, "num_heads": 8, "vocab_size": 4096}

TRANSFORMER = Family(
    config_class="fla.models.TransformerConfig",
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
)

GLA = Family(
    config_class="fla.models.GLAConfig",
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
)
