"""The one list of tiny models that tests run: every registered architecture, and one that belongs to no library.

`ARCHITECTURES` has few architectures, which use different features of the engine. Tests of a feature run all of them.
`FAMILIES` has other architectures, with variants of their options. Their plans are proved.
`FURTHER` has architectures whose plans are like those in `FAMILIES`. Their plans are proved quickly, with one step.

    config = zoo.config("gla")                      # with the options that change a style of its plan
    config = zoo.config("gla", options=False)       # without these options
    model, inputs = zoo.build("gla"), zoo.inputs("gla", seq_len=16)

Sizes are small, and the structure is the family's own: a model is the family's debug flavor with eight heads, and in most
families fewer key/value heads, reduced to two blocks and a hidden size of 64. "tiny" is the model of
tests/support/tiny_model.py, which has no config.
A new architecture is a line in `FAMILIES`, or in `FURTHER` if its plan has no new style.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import TPPlan, kernels, modeling, registered_plans
from titanplans.modeling.samples import build_real, sample_inputs


class Architecture(NamedTuple):
    """Fields of the config that differ from the debug flavor."""

    sizes: dict[str, Any]
    options: dict[str, Any]
    """Config fields that change a style of the plan, or the modules that a style applies to. A proof sets all together."""


_FLA = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=48, vocab_size=96)
_DENSE = _FLA | dict(head_dim=16)
_NSA = _FLA | dict(num_hidden_layers=1, head_dim=4, block_size=4, block_counts=2, window_size=5)
_YOCO = _FLA | dict(num_self_decoder_layers=1)
_SLIDING_AND_FULL = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
_EXPERTS = _FLA | dict(moe_intermediate_size=16, num_experts=4)
_BALANCE = dict(output_router_logits=True, router_aux_loss_coef=0.1)
_FALCON = dict(hidden_size=64, num_hidden_layers=2, ffn_hidden_size=48, vocab_size=96)

ARCHITECTURES = {
    "transformer": Architecture(_FLA, dict(num_kv_heads=4, qk_norm=True, qkv_bias=True)),
    "gla": Architecture(_FLA, dict(num_kv_heads=2, use_short_conv=True)),
    "llama": Architecture(_DENSE, dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True)),
    "mistral": Architecture(_DENSE, dict(num_key_value_heads=2, sliding_window=6)),
    "qwen2": Architecture(_FLA, dict(num_key_value_heads=4)),  # the only one without head_dim
    "qwen3": Architecture(_DENSE, dict(num_key_value_heads=8, tie_word_embeddings=True)),
    "gemma3_text": Architecture(_DENSE, dict(final_logit_softcapping=20.0, attn_logit_softcapping=30.0)),
    # The image tokens are the last tokens of the debug flavor's vocabulary.
    "gemma3": Architecture(
        {name: size for name, size in _DENSE.items() if name != "vocab_size"}
        | dict(vision_config=dict(num_hidden_layers=1)),
        {},
    ),
}
_SSM = dict(hidden_size=64, num_hidden_layers=2, state_size=8, vocab_size=96)
_RWKV = _FLA | dict(use_l2warp=False)
_RAVEN = _FLA | dict(num_heads=8, num_slots=8, topk=4, add_gumbel_noise=False)
_RODIMUS = _FLA | dict(expand_ratio=8, residual_in_fp32=False, ska_attn=dict(num_heads=8, window_size=5))

FAMILIES: dict[str, tuple[dict[str, Any], ...]] = {
    "gated_deltanet": (
        _FLA | dict(head_dim=8, num_heads=8),
        _FLA | dict(head_dim=8, num_heads=2, num_v_heads=8, use_gate=False),
        _FLA
        | dict(
            head_dim=8, num_heads=8, use_short_conv=False, allow_neg_eigval=True, tie_word_embeddings=True
        ),
        _FLA | dict(head_dim=8, num_heads=8, attn=dict(layers=[1], num_heads=8, num_kv_heads=2)),
    ),
    "delta_net": (
        _FLA | dict(use_gate=True, use_beta=False, attn=dict(layers=[1], num_heads=8)),
        _FLA | dict(use_short_conv=False, qk_norm="sum", qk_activation="elu", tie_word_embeddings=True),
    ),
    "kda": (
        _FLA | dict(head_dim=8, num_heads=2, num_v_heads=8, use_short_conv=False, allow_neg_eigval=True),
        _FLA
        | dict(head_dim=8, expand_v=2.0, lower_bound=-5.0, safe_gate=True, tie_word_embeddings=True)
        | dict(attn=dict(layers=[1], num_heads=8)),
    ),
    "gated_deltaproduct": (
        _FLA | dict(head_dim=8),
        _FLA
        | dict(head_dim=8, num_householder=3, use_forget_gate=False, use_output_gate=False)
        | dict(use_short_conv=False, allow_neg_eigval=True, attn=dict(layers=[1], num_heads=8)),
    ),
    "comba": (
        _FLA
        | dict(head_dim=8, use_inner_decay=False, use_output_correction=False)
        | dict(attn=dict(layers=[1], num_heads=8)),
        _FLA
        | dict(head_dim=8, num_heads=2, num_v_heads=8, use_output_gate=False, use_short_conv=False)
        | dict(tie_word_embeddings=True),
    ),
    "mesa_net": (
        _FLA | dict(head_dim=8), _FLA | dict(head_dim=8, use_output_gate=True, attn=dict(layers=[1], num_heads=8)),
    ),
    "path_attn": (
        _FLA | dict(num_kv_heads=2, use_forget_gate=True),
        _FLA | dict(use_low_rank_w=False, use_w_shortconv=False, tie_word_embeddings=True),
    ),
    "precond_gated_deltanet": (
        _FLA | dict(head_dim=8),
        _FLA
        | dict(head_dim=8, num_heads=2, num_v_heads=8, use_gate=False, use_short_conv=False)
        | dict(allow_neg_eigval=True, attn=dict(layers=[1], num_heads=8)),
    ),
    "precond_kda": (
        _FLA | dict(head_dim=8),
        _FLA
        | dict(head_dim=8, num_heads=2, num_v_heads=8, use_short_conv=False, allow_neg_eigval=True)
        | dict(lower_bound=-5.0, safe_gate=True, attn=dict(layers=[1], num_heads=8)),
    ),
    "cyclic_flow_attention": (
        _FLA | dict(head_dim=8, expand_v=2.0, conv_bias=True, tie_word_embeddings=True),
        _FLA | dict(head_dim=8, use_short_conv=False),
    ),
    "mom": (
        _FLA | dict(head_dim=8, num_memories=3),
        _FLA | dict(head_dim=8, single_kv_proj=True, shared_mem=False, use_output_gate=False),
    ),
    # Mixtures of experts
    "mixtral": (_FLA | _BALANCE | dict(num_key_value_heads=2, num_local_experts=4),),
    "qwen2_moe": (_EXPERTS | _BALANCE | dict(shared_expert_intermediate_size=24, mlp_only_layers=[0]),),
    "qwen3_moe": (_EXPERTS | _BALANCE | dict(attention_bias=True, tie_word_embeddings=True),),
    "qwen3_next": (
        _EXPERTS | _BALANCE | dict(shared_expert_intermediate_size=24, layer_types=["linear_attention", "full_attention"]),
    ),
    "olmoe": (_FLA | _BALANCE | dict(num_key_value_heads=2, intermediate_size=16, num_experts=4),),
    "glm4_moe": (
        _FLA | dict(moe_intermediate_size=16, use_qk_norm=True),
        _FLA | dict(moe_intermediate_size=16, attention_bias=True, num_key_value_heads=2),
    ),
    "deepseek_v2": (_FLA | dict(moe_intermediate_size=16),),
    "deepseek_v3": (
        _FLA | dict(moe_intermediate_size=16),
        _FLA | dict(moe_intermediate_size=16, q_lora_rank=None, attention_bias=True, n_shared_experts=2),
    ),
    "gpt_oss": (_DENSE | _BALANCE | dict(num_key_value_heads=2, intermediate_size=16, sliding_window=6),),
    "llama4_text": (
        _DENSE | dict(intermediate_size=16, intermediate_size_mlp=48, attention_chunk_size=6, no_rope_layers=[1, 0]),
    ),
    # Dense decoders of transformers
    "phi3": (_FLA | dict(num_key_value_heads=2, sliding_window=6), _FLA | dict(num_key_value_heads=8)),
    "glm4": (_DENSE | dict(num_key_value_heads=2),),
    "olmo2": (_FLA | dict(num_key_value_heads=2, attention_bias=True),),
    "olmo3": (_FLA | _SLIDING_AND_FULL,),
    "gemma2": (_DENSE | dict(sliding_window=6),),
    "cohere2": (_FLA | _SLIDING_AND_FULL,),
    "smollm3": (_FLA | dict(no_rope_layer_interval=2),),
    "granite": (_FLA | dict(mlp_bias=True),),
    "helium": (_FLA | dict(head_dim=8),),
    "starcoder2": (_FLA,),
    "stablelm": (
        _FLA | dict(num_key_value_heads=2, use_qkv_bias=True), _FLA | dict(qk_layernorm=True, use_parallel_residual=True),
    ),
    "gpt_neox": (_FLA, _FLA | dict(use_parallel_residual=False)),
    "gpt2": (dict(n_embd=64, n_layer=2, n_inner=48, vocab_size=96),),
    "falcon": (
        _FALCON,
        _FALCON | dict(new_decoder_architecture=True, num_kv_heads=4, bias=True),
        _FALCON | dict(multi_query=False, alibi=True, parallel_attn=False),
    ),
    # Recurrent mixers of flash-linear-attention
    "hgrn": (_FLA, _FLA | dict(use_short_conv=True, use_lower_bound=False, elementwise_affine=False)),
    "hgrn2": (
        _FLA | dict(num_heads=8, expand_ratio=8),
        _FLA | dict(num_heads=8, expand_ratio=4, use_short_conv=True, use_lower_bound=False),
        _FLA
        | dict(num_heads=8, expand_ratio=8, elementwise_affine=False, attn=dict(layers=[0], num_heads=8)),
    ),
    "log_linear_mamba2": (
        _SSM | dict(head_dim=16),
        _SSM | dict(head_dim=16, n_groups=2, use_bias=True, D_has_hdim=True, attnres_block_size=2),
        _SSM | dict(head_dim=16, rmsnorm=False, tie_word_embeddings=True),
    ),
    "mamba": (_SSM, _SSM | dict(use_bias=True, use_conv_bias=False, tie_word_embeddings=True)),
    "mamba2": (
        _SSM | dict(head_dim=16),
        _SSM | dict(head_dim=16, n_groups=2, use_bias=True, norm_before_gate=True),
        _SSM | dict(head_dim=16, n_groups=4, D_has_hdim=True, tie_word_embeddings=True, use_conv_bias=False),
        _SSM | dict(head_dim=16, rmsnorm=False),
    ),
    "mamba3": (
        _SSM | dict(head_dim=16),
        _SSM | dict(head_dim=16, n_groups=2, use_bias=True, is_outproj_norm=True, rope_fraction=1.0),
        _SSM | dict(head_dim=16, n_groups=4, is_mimo=True, mimo_rank=2, tie_word_embeddings=True),
        _SSM | dict(head_dim=16, n_groups=2, is_mimo=True, mimo_rank=2, is_outproj_norm=True),
    ),
    "raven": (
        _RAVEN,
        _RAVEN | dict(num_kv_heads=2, decay_type="GLA", router_type="mlp", bias_rmm=True, fuse_norm=False),
        _RAVEN | dict(num_kv_heads=4, use_output_gate=True, feature_map="t2r", use_rope=True),
        _RAVEN | dict(router_score="softmax", elementwise_affine=False, attn=dict(layers=[0], num_heads=8)),
    ),
    "rodimus": (
        _RODIMUS,
        _RODIMUS
        | dict(
            residual_in_fp32=True,
            block_residual_in_fp32=True,
            ska_attn=dict(num_heads=4, qk_norm=True, qkv_bias=True),
        ),
        _RODIMUS | dict(block_type="rodimus", use_short_conv=False, attn=dict(layers=[1], num_heads=8)),
    ),
    "rwkv6": (
        _RWKV | dict(num_heads=8),
        _RWKV
        | dict(
            num_heads=4, expand_k=1.0, fuse_norm=False, norm_first=False, attn=dict(layers=[1], num_heads=8)
        ),
    ),
    "rwkv7": (
        _RWKV | dict(head_dim=8),
        _RWKV
        | dict(head_dim=16, fuse_norm=False, norm_first=False, norm_bias=False, tie_word_embeddings=True),
    ),
    "samba": (
        _SSM | dict(attn=dict(layers=[1], num_heads=8, num_kv_heads=2, window_size=5)),
        _SSM | dict(attn=None, use_bias=True, attnres_block_size=2),
    ),
    # Softmax attention and its relatives.
    "linear_attn": (
        _FLA | dict(num_kv_heads=2, norm_q=True, norm_feature_map=True, feature_map="hedgehog"),
        _FLA | dict(feature_map="elementwise_product", tie_feature_map_qk=True, tie_word_embeddings=True),
        _FLA | dict(feature_map="t2r", attn=dict(layers=[1], num_heads=8, num_kv_heads=2)),
    ),
    "abc": (
        _FLA | dict(num_slots=4, exapnd_k=1.0, use_short_conv=True),
        _FLA | dict(num_slots=None, use_rope=False, attn=dict(layers=[1], num_heads=8, num_kv_heads=2)),
    ),
    "retnet": (
        _FLA | dict(num_kv_heads=2, use_short_conv=True),
        _FLA | dict(use_output_gate=False, feature_map="relu", tie_word_embeddings=True),
        _FLA | dict(fuse_norm=False, attn=dict(layers=[1], num_heads=8, num_kv_heads=2)),
    ),
    "deltaformer": (
        _FLA | dict(qkv_bias=True, qk_norm=True),
        _FLA | dict(tie_word_embeddings=True, attn=dict(layers=[1], num_heads=8, num_kv_heads=2)),
    ),
    "parallax": (
        _FLA | dict(num_kv_heads=2, qkv_bias=True, qk_norm=True), _FLA | dict(window_size=5, tie_word_embeddings=True),
    ),
    "forgetting_transformer": (
        _FLA | dict(num_kv_heads=2, qkv_bias=True, qk_norm=True),
        _FLA | dict(use_output_gate=True, tie_word_embeddings=True),
    ),
    "wall_transformer": (
        _FLA | dict(num_kv_heads=2, qkv_bias=True, qk_norm=True, use_scalar_gate=True),
        _FLA | dict(use_output_gate=True, window_size=5, tie_word_embeddings=True),
    ),
    "stickbreaking_attn": (
        _FLA | dict(num_kv_heads=2, qkv_bias=True, qk_norm=True),
        _FLA | dict(attend_current=True, tie_word_embeddings=True),
    ),
    "moba": (
        _FLA | dict(qkv_bias=True, qk_norm=True, moba_chunk_size=4, moba_topk=2),
        _FLA | dict(use_output_gate=True, moba_chunk_size=3, moba_topk=3, tie_word_embeddings=True),
    ),
    "mla": (_FLA, _FLA | dict(q_lora_rank=None, window_size=5, tie_word_embeddings=True)),
    "gsa": (
        _FLA | dict(num_slots=4, num_kv_heads=2, use_short_conv=True),
        _FLA | dict(num_slots=4, feature_map="t2r", tie_word_embeddings=True),
        _FLA
        | dict(num_slots=4, elementwise_affine=False, attn=dict(layers=[1], num_heads=8, num_kv_heads=2)),
    ),
    "lightnet": (
        _FLA | dict(expand_ratio=8, gate_low_rank_dim=4, use_short_conv=True),
        _FLA
        | dict(expand_ratio=4, gate_low_rank_dim=4, attnres_block_size=2, attn=dict(layers=[1], num_heads=8)),
    ),
    "bitnet": (_FLA | dict(num_kv_heads=2), _FLA | dict(window_size=5, tie_word_embeddings=True)),
    "nsa": (_NSA | dict(qkv_bias=True), _NSA | dict(tie_word_embeddings=True)),
    "cat": (
        _FLA | dict(num_kv_heads=2, qkv_bias=True, qk_norm=True, pad_to_multiple_of=8, max_chunk_size=4),
        _FLA
        | dict(
            pad_to_multiple_of=1,
            max_chunk_size=4,
            train_chunk_size_schedule="fixed",
            tie_word_embeddings=True,
        ),
    ),
    "yoco": (
        _YOCO | dict(cross_decoder_attn=dict(num_heads=8, num_kv_heads=2, qkv_bias=True, qk_norm=True)),
        _YOCO | dict(self_decoder_attn=dict(type="gated_retention", num_heads=8), attnres_block_size=2),
        _YOCO
        | dict(
            self_decoder_attn=dict(type="swa", num_heads=8, num_v_heads=2, window_size=5),
            tie_word_embeddings=True,
        ),
    ),
}  # fmt: skip
"""The config fields of each variant. Together the variants have every option that changes a style of the plan."""

_KV2 = _FLA | dict(num_key_value_heads=2)
_TOP2 = _KV2 | dict(moe_intermediate_size=16)
_ONLY_EXPERTS = {name: size for name, size in _TOP2.items() if name != "intermediate_size"}
_MAMBA2 = _KV2 | dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8)
_GRANITE = _KV2 | dict(intermediate_size=16)
_GPT = dict(n_embd=64, n_layer=2, vocab_size=96)
_LINEAR_AND_FULL = dict(layer_types=["linear_attention", "full_attention"])
_CONV_AND_FULL = dict(layer_types=["conv", "full_attention"])
_DENSE_AND_SPARSE = dict(mlp_layer_types=["dense", "sparse"])
_INDEXED = _TOP2 | _DENSE_AND_SPARSE | dict(num_key_value_heads=8, layer_types=["indexed_attention"] * 2)

FURTHER: dict[str, dict[str, Any]] = {
    # Dense decoders
    "apertus": _KV2,
    "arcee": _KV2 | dict(attention_bias=True, mlp_bias=True),
    "bloom": dict(hidden_size=64, n_layer=2, vocab_size=96),
    "cohere": _KV2,
    "cwm": _KV2 | _SLIDING_AND_FULL,
    "ernie4_5": _KV2 | dict(use_bias=True),
    "exaone4": _KV2 | _SLIDING_AND_FULL,
    "gemma": _KV2 | dict(num_key_value_heads=1),
    "gemma4_text": _KV2
    | dict(num_hidden_layers=4, sliding_window=6, num_kv_shared_layers=2)
    | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=96),
    "glm": _KV2,
    "hunyuan_v1_dense": _KV2 | dict(attention_bias=True),
    "hyperclovax": _KV2,
    "codegen": _GPT | dict(n_inner=48),
    "gpt_bigcode": _GPT | dict(n_inner=48),
    "gpt_neo": dict(
        hidden_size=64, num_layers=2, vocab_size=96, intermediate_size=48, attention_types=[[["global", "local"], 1]]
    ),
    "gptj": _GPT | dict(n_inner=48),
    "granite_swa": _KV2 | _SLIDING_AND_FULL | dict(layer_rope_theta=[10000.0, 10000.0]),
    "internlm3": _KV2,
    "iquestcoder": _KV2,
    "jais2": _KV2,
    "minicpm3": _KV2 | dict(num_key_value_heads=8),
    "ministral": _KV2 | _SLIDING_AND_FULL,
    "ministral3": _KV2,
    "mpt": dict(d_model=64, n_layers=2, vocab_size=96),
    "nanochat": _KV2,
    "nemotron": _KV2 | dict(attention_bias=True, mlp_bias=True),
    "olmo": _KV2 | dict(clip_qkv=0.5),
    "persimmon": _FLA,
    "phi": _KV2 | dict(qk_layernorm=True),
    "seed_oss": _KV2,
    "vaultgemma": _KV2 | _SLIDING_AND_FULL,
    "youtu": _KV2 | dict(num_key_value_heads=8),
    # Mixtures of experts
    "afmoe": _TOP2 | _SLIDING_AND_FULL | dict(num_experts=4),
    "cohere2_moe": _GRANITE,
    "dots1": _TOP2,
    "ernie4_5_moe": _TOP2 | dict(use_bias=True, moe_num_experts=4),
    "exaone_moe": _TOP2 | _SLIDING_AND_FULL | _DENSE_AND_SPARSE | dict(num_experts=4),
    "flex_olmo": _GRANITE | _BALANCE,
    "flint": _TOP2 | _BALANCE | _SLIDING_AND_FULL | dict(num_experts=4, shared_expert_intermediate_size=24),
    "granitemoe": _GRANITE | _BALANCE,
    "granitemoe_swa": _GRANITE | _BALANCE | _SLIDING_AND_FULL | dict(layer_rope_theta=[10000.0, 10000.0]),
    "granitemoeshared": _GRANITE | _BALANCE | dict(shared_intermediate_size=24),
    "hunyuan_v1_moe": _GRANITE | dict(num_experts=4),
    "hy_v3": _TOP2 | _DENSE_AND_SPARSE,
    "glm4_moe_lite": _TOP2 | _DENSE_AND_SPARSE | dict(num_key_value_heads=8),
    "kolibri1": _ONLY_EXPERTS,
    "mellum": _TOP2 | _BALANCE | _SLIDING_AND_FULL,
    "minimax_m2": _GRANITE | _BALANCE,
    "mimo_v2_flash": _TOP2 | _SLIDING_AND_FULL | _DENSE_AND_SPARSE,
    "sarvam_mla": _TOP2 | dict(num_key_value_heads=8),
    "sarvam_moe": _TOP2,
    "solar_open": _ONLY_EXPERTS,
    # Latent attention to indexed keys
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED | dict(indexer_types=["full", "full"]),
    "hy_v4": _INDEXED | dict(indexer_types=["full", "shared"]),
    # Linear attention, state spaces and convolutions
    "bamba": _MAMBA2 | dict(attn_layer_indices=[1]),
    "falcon_h1": _MAMBA2 | dict(mamba_d_ssm=128),
    "granitemoehybrid": _GRANITE | _BALANCE | _LINEAR_AND_FULL | dict(mamba_n_heads=8, mamba_d_state=8),
    "falcon_mamba": dict(hidden_size=64, num_hidden_layers=2, state_size=8, vocab_size=96),
    "jamba": _KV2 | dict(num_experts=4, output_router_logits=True, router_aux_loss_coef=0.1),
    "kimi_linear": _TOP2 | _LINEAR_AND_FULL | _DENSE_AND_SPARSE | dict(num_key_value_heads=8),
    "lfm2": _KV2 | _CONV_AND_FULL,
    "lfm2_moe": _TOP2 | _CONV_AND_FULL,
    "lfm3": _KV2 | _CONV_AND_FULL,
    "lara_mini": _ONLY_EXPERTS | _BALANCE | _LINEAR_AND_FULL | dict(shared_expert_intermediate_size=24, num_experts=4),
    "minimax": _GRANITE | _BALANCE | _LINEAR_AND_FULL,
    "nemotron_h": dict(
        hidden_size=64, vocab_size=96, intermediate_size=48, num_key_value_heads=2, mamba_num_heads=8, ssm_state_size=8,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=24, n_routed_experts=4
    ),
    "olmo_hybrid": _KV2 | _LINEAR_AND_FULL,
    "qwen3_5_text": _KV2 | _LINEAR_AND_FULL,
    "qwen3_5_moe_text": _ONLY_EXPERTS
    | _BALANCE
    | _LINEAR_AND_FULL
    | dict(shared_expert_intermediate_size=24, num_experts=4),
}  # fmt: skip
"""Further architectures: the config fields of one variant each. Their plans use the same styles as the plans above.

`make test-all` proves each of them with one plain step for each way to split, and `verify --all` with all conditions."""

BESIDES = FAMILIES.keys() | FURTHER.keys()
"""The names of all architectures that are not in `ARCHITECTURES`."""

ODD = dict(intermediate_size=45, vocab_size=97)
"""Sizes that no degree divides. For gemma3 only the first is used."""
EVERY = (*ARCHITECTURES, "tiny")
"""The names of `ARCHITECTURES`, and last the model that belongs to no library."""


def fields(name: str, *, options: bool = True) -> dict[str, Any]:
    """Return the config fields of a registered architecture that differ from its debug flavor."""
    if name in FURTHER:
        return FURTHER[name]
    if name in FAMILIES:
        return FAMILIES[name][0]
    architecture = ARCHITECTURES[name]
    return architecture.sizes | (architecture.options if options else {})


def config(name: str, *, options: bool = True, **overrides: Any) -> PretrainedConfig:
    """Return the tiny config of a registered architecture. `overrides` replace fields of the config."""
    return modeling.load_config(name, "debug", **fields(name, options=options) | overrides)


def build(
    name: str, *, dtype: torch.dtype = torch.float64, options: bool = True, **overrides: Any
) -> nn.Module:
    """Return a tiny model on the CPU, with the same weights each time."""
    if name == "tiny":
        torch.manual_seed(0)
        return Tiny(**overrides).to(dtype)
    kernels.install("cpu")
    return build_real(config(name, options=options, **overrides), dtype=dtype)


def inputs(name: str, *, batch_size: int = 2, seq_len: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return keyword arguments for a forward pass: tokens, and for gemma3 an image in each sequence."""
    if name == "tiny":
        generator = torch.Generator().manual_seed(seed)
        return {"input_ids": torch.randint(32, (batch_size, seq_len), generator=generator)}
    return sample_inputs(config(name), batch_size=batch_size, seq_len=seq_len, seed=seed)


def plan(name: str) -> type[TPPlan]:
    """Return the plan of a tiny model."""
    return TinyPlan if name == "tiny" else registered_plans()[name]


def float32_of_routers() -> set[str]:
    """Return the tensors that routers of DeepSeek-V3 and GLM-4.5 keep in float32; since transformers 5.24 also the
    weight."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel as Model

    weight = {"gate.weight"} if "gate.weight" in Model._keep_in_fp32_modules_strict else set()
    return {"gate.e_score_correction_bias"} | weight


def odd_qwen3():
    """Return a model with tied embeddings, sizes that no degree divides, and two heads of keys and values."""
    return build("qwen3", dtype=torch.float32, num_key_value_heads=2, **ODD)
