"""A tiny model for each registered plan, with every option of its config that changes a style of the plan.

    registered     model here     what its plan has that those above do not
    transformer    itself         all: biases, q/k norms, residual mixing
    gla            itself         a mixer with short convolutions and an output gate
    llama          itself         all: biases in every projection
    mistral        llama          the same class
    qwen2          itself         tied weights
    qwen3          itself         q/k norms
    gemma3_text    itself         four norms, windows, soft caps, tied and scaled embedding
    gemma3         itself         vision tower, projector, images

Where two plans agree at a key, its mutants are made for the first (tests/mutants/corpus.py). All models but the last
have two blocks, 32 wide, four heads and two key/value heads, which four ranks share; the vocabulary of 51, the
MLPs of 47 and the sequence of 7 are not divisible by either degree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from titanplans import TPPlan, modeling, registered_plans
from titanplans.modeling import kernels
from titanplans.proof.reference import Reference
from titanplans.proof.sample import moved, randomise, token_ids

VOCABULARY, WIDTH, SEQUENCE = 51, 32, 7
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2}
_FLA = {**_SIZES, "intermediate_size": 47, "num_heads": 4, "num_kv_heads": 2, "use_cache": False}
_HF = {**_SIZES, "intermediate_size": 47, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_EAGER = {"attn_implementation": "eager"}  # counts heads by attributes, and has a soft cap
_GEMMA = {
    **_HF,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    **_EAGER,
}


@dataclass(frozen=True)
class Architecture:
    """A registered plan and its tiny model."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], dict[str, Any]] = lambda model: token_ids(model, 2, SEQUENCE, 1, 0)

    @property
    def plan(self) -> type[TPPlan]:
        return registered_plans()[self.name]

    @cache  # noqa: B019 -- a handful of frozen instances, all of the module's
    def reference(self) -> Reference:
        """Return the whole model after its step: once for all mutants of the architecture."""
        kernels.install("cpu")
        torch.manual_seed(0)
        model = self.build().double().train()
        randomise(model, seed=0)
        return Reference(model, moved(self.inputs(model), torch.device("cpu"), torch.float64), seed=0)


def _transformer() -> nn.Module:
    from fla.models import TransformerConfig, TransformerForCausalLM

    return TransformerForCausalLM(
        TransformerConfig(**_FLA, qk_norm=True, qkv_bias=True, attnres_block_size=2)
    )


def _gla() -> nn.Module:
    from fla.models import GLAConfig, GLAForCausalLM

    return GLAForCausalLM(GLAConfig(**_FLA, use_short_conv=True))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_HF, attention_bias=True, mlp_bias=True, **_EAGER))


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_HF, tie_word_embeddings=True))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_HF))


def _gemma3_text() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA, tie_word_embeddings=True))


def _gemma3() -> nn.Module:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=_GEMMA | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        vision_config=vision | {"image_size": 8, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=VOCABULARY - 3,
        eoi_token_index=VOCABULARY - 2,
        image_token_index=VOCABULARY - 1,
        **_EAGER,
    )
    return Gemma3ForConditionalGeneration(config)


def _images(model: nn.Module) -> dict[str, Any]:
    return modeling.sample_inputs(model.config, batch_size=2, seq_len=SEQUENCE, seed=0)  # type: ignore[arg-type]


ARCHITECTURES = (
    Architecture("transformer", _transformer),
    Architecture("gla", _gla),
    Architecture("llama", _llama),
    Architecture("qwen2", _qwen2),
    Architecture("qwen3", _qwen3),
    Architecture("gemma3_text", _gemma3_text),
    Architecture("gemma3", _gemma3, _images),
)
