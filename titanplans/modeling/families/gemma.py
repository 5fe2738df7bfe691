"""Gemma 3, text alone and with its SigLIP vision tower, as transformers implements them.

Sizes: the table `_VARIANTS` of transformers' own conversion script, models/gemma3/convert_gemma3_weights.py,
with the vocabulary of the released config.json: 262,144 in 270M and 1B, and 64 rows more in 4B, 12B and 27B,
which hold an image token. Fields equal to the defaults of `Gemma3TextConfig`, `SiglipVisionConfig` and
`Gemma3Config` in transformers 5.23 are left out: five sliding layers to one full layer, tied embeddings, no
soft caps, 256 tokens an image.
"""

from typing import Any

from titanplans.modeling.families.family import Family


def _text(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int, **others: Any
) -> dict[str, Any]:
    """Fields of `Gemma3TextConfig`; scores are divided by the root of `query_pre_attn_scalar`, by default `head_dim`."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "intermediate_size": mlp,
        **others,
    }


def _rope(**full: Any) -> dict[str, Any]:
    """Two rotary bases: 10,000 in sliding layers, 1,000,000 in full ones, there with the scaling `full`."""
    return {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0} | full,
        }
    }


_SMALL = _rope() | {"vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512}
_LARGE = _rope(rope_type="linear", factor=8.0) | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
}
_4B = _text(2560, 34, 8, 4, 256, 10240, **_LARGE)
_12B = _text(3840, 48, 16, 8, 256, 15360, **_LARGE)
# query_pre_attn_scalar of 27B is hidden_size / heads, not head_dim.
_27B = _text(5376, 62, 32, 16, 128, 21504, **_LARGE) | {"query_pre_attn_scalar": 168}


def _debug(kv_heads: int) -> dict[str, Any]:
    """Ours: two sliding and two full layers, a window of 8 tokens; heads wider together than the model, as in 4B."""
    sizes = _text(128, 4, 8, kv_heads, 32, 512, vocab_size=4096, max_position_embeddings=32768)
    return sizes | _rope() | {"sliding_window": 8, "sliding_window_pattern": 2}


GEMMA3_TEXT = Family(
    config_class="transformers.Gemma3TextConfig",
    flavors={
        "debug": _debug(kv_heads=1),
        "270M": _text(640, 18, 4, 1, 256, 2048, **_SMALL),  # google/gemma-3-270m
        "1B": _text(1152, 26, 4, 1, 256, 6912, **_SMALL),  # google/gemma-3-1b-pt
        "4B": _4B,  # text_config of google/gemma-3-4b-pt
        "12B": _12B,  # text_config of google/gemma-3-12b-pt
        "27B": _27B,  # text_config of google/gemma-3-27b-pt
    },
)

# SigLIP So400m/14 at 896 x 896: 64 x 64 patches, averaged to 16 x 16 image tokens.
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}

GEMMA3 = Family(
    config_class="transformers.Gemma3Config",
    flavors={
        # Ours: 4 x 4 patches averaged to 2 x 2 image tokens; the special tokens are the vocabulary's last.
        "debug": {
            "text_config": _debug(kv_heads=2),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": 4,
            "boi_token_index": 4093,
            "eoi_token_index": 4094,
            "image_token_index": 4095,
        },
        "4B": {"text_config": _4B, "vision_config": _SIGLIP},  # google/gemma-3-4b-pt
        "12B": {"text_config": _12B, "vision_config": _SIGLIP},  # google/gemma-3-12b-pt
        "27B": {"text_config": _27B, "vision_config": _SIGLIP},  # google/gemma-3-27b-pt
    },
)
