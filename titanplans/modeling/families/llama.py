"""Llama and Mistral, as transformers implements them.

Every size but `debug` is that of a config.json on the Hugging Face hub, named at the flavor. Fields equal to
the defaults of `LlamaConfig` and `MistralConfig` in transformers 5.23 are left out, and so are the ids of
special tokens, which belong to a tokenizer.
"""

from typing import Any

from titanplans.modeling.families.family import Family


def _llama3(factor: float) -> dict[str, Any]:
    """Vocabulary, context and rotary scaling of Llama 3.1 (factor 8) and 3.2 (factor 32)."""
    return {
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


LLAMA = Family(
    config_class="transformers.LlamaConfig",
    flavors={
        # Ours: 8 key/value heads, one for each query head; Llama 3.2's rotary scaling.
        "debug": _llama3(32.0)
        | {
            "vocab_size": 4096,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "intermediate_size": 512,
        },
        # meta-llama/Llama-3.2-1B
        "3.2-1B": _llama3(32.0)
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "tie_word_embeddings": True,
        },
        # meta-llama/Llama-3.2-3B
        "3.2-3B": _llama3(32.0)
        | {
            "hidden_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "tie_word_embeddings": True,
        },
        # meta-llama/Llama-3.1-8B
        "3.1-8B": _llama3(8.0)
        | {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
        },
        # meta-llama/Llama-3.1-70B
        "3.1-70B": _llama3(8.0)
        | {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
        },
        # meta-llama/Llama-2-7b-hf: the defaults' sizes
        "2-7B": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    },
)

_MISTRAL = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_window": None,  # full attention since v0.2
}

MISTRAL = Family(
    config_class="transformers.MistralConfig",
    flavors={
        # Ours: 2 key/value heads; heads narrower than hidden_size / heads, as in Nemo.
        "debug": _MISTRAL
        | {
            "vocab_size": 4096,
            "hidden_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 512,
            "max_position_embeddings": 32768,
        },
        # mistralai/Mistral-7B-v0.3
        "7B-v0.3": _MISTRAL | {"vocab_size": 32768, "max_position_embeddings": 32768},
        # mistralai/Mistral-Nemo-Base-2407, whose context its revisions give as 1,024,000 or 128,000: the card's 128k
        "Nemo-12B": _MISTRAL
        | {
            "vocab_size": 131072,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "head_dim": 128,
            "max_position_embeddings": 128000,
        },
    },
)
