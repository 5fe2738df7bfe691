"""Qwen2 (the sizes of the Qwen2.5 release) and Qwen3, as transformers implements them.

Every size but `debug` is that of a config.json on the Hugging Face hub, named at the flavor. Fields equal to
the defaults of `Qwen2Config` and `Qwen3Config` in transformers 5.23 are left out, among them the vocabulary of
151,936 and, for Qwen3, heads of 128.
"""

from typing import Any

from titanplans.modeling.families.family import Family

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, **others: Any) -> dict[str, Any]:
    return _ROPE | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        **others,
    }


_TIED = {"tie_word_embeddings": True}
# The base models of Qwen2.5: from 7B on a larger, untied vocabulary; from 14B on another epsilon.
_LONG = {"max_position_embeddings": 131072}
_WIDE = _LONG | {"vocab_size": 152064}
_LARGE = _WIDE | {"rms_norm_eps": 1e-5}

QWEN2 = Family(
    config_class="transformers.Qwen2Config",
    flavors={
        # Ours: 4 key/value heads, biases on q, k and v (no flag: Qwen2 always has them), tied embeddings.
        "debug": _qwen(128, 4, 8, 4, 512, vocab_size=4096, **_TIED),
        "0.5B": _qwen(896, 24, 14, 2, 4864, **_TIED),  # Qwen/Qwen2.5-0.5B
        "1.5B": _qwen(1536, 28, 12, 2, 8960, **_TIED, **_LONG),  # Qwen/Qwen2.5-1.5B
        "3B": _qwen(2048, 36, 16, 2, 11008, **_TIED),  # Qwen/Qwen2.5-3B
        "7B": _qwen(3584, 28, 28, 4, 18944, **_WIDE),  # Qwen/Qwen2.5-7B
        "14B": _qwen(5120, 48, 40, 8, 13824, **_LARGE),  # Qwen/Qwen2.5-14B
        "32B": _qwen(5120, 64, 40, 8, 27648, **_LARGE),  # Qwen/Qwen2.5-32B
        "72B": _qwen(8192, 80, 64, 8, 29568, **_LARGE),  # Qwen/Qwen2.5-72B
    },
)

# The post-trained models; the -Base ones differ in max_position_embeddings alone (32,768). There is no base 32B.
_CONTEXT = {"max_position_embeddings": 40960}

QWEN3 = Family(
    config_class="transformers.Qwen3Config",
    flavors={
        # Ours: 4 key/value heads, heads wider together than the model as in 0.6B, 4B and 32B.
        "debug": _qwen(128, 4, 8, 4, 512, vocab_size=4096, head_dim=32, **_CONTEXT),
        "0.6B": _qwen(1024, 28, 16, 8, 3072, **_TIED, **_CONTEXT),  # Qwen/Qwen3-0.6B
        "1.7B": _qwen(2048, 28, 16, 8, 6144, **_TIED, **_CONTEXT),  # Qwen/Qwen3-1.7B
        "4B": _qwen(2560, 36, 32, 8, 9728, **_TIED, **_CONTEXT),  # Qwen/Qwen3-4B
        "8B": _qwen(4096, 36, 32, 8, 12288, **_CONTEXT),  # Qwen/Qwen3-8B
        "14B": _qwen(5120, 40, 40, 8, 17408, **_CONTEXT),  # Qwen/Qwen3-14B
        "32B": _qwen(5120, 64, 64, 8, 25600, **_CONTEXT),  # Qwen/Qwen3-32B
    },
)
