"""Two small configs of an architecture: `small_configs`. A plan is derived from models of these sizes, in seconds on a CPU.

The sizes of the two differ, so that an expression that holds in both is rarely right by chance.
"""

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from titanplans import modeling
from titanplans.errors import ModelError, UserError


class _Size(NamedTuple):
    names: tuple[str, ...]
    first: int | float
    second: int | float


_SIZES = (
    _Size(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width"), 64, 96),
    _Size(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "mlp_hidden_size", "block_ff_dim"),
        96,
        80,
    ),
    _Size(("encoder_ffn_dim", "decoder_ffn_dim"), 96, 80),
    _Size(("encoder_attention_heads", "decoder_attention_heads"), 8, 4),
    _Size(("moe_intermediate_size", "expert_ffn_size", "expert_ffn_hidden_size"), 32, 48),
    _Size(
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"), 48, 56
    ),
    _Size(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 8, 4),
    _Size(("num_key_value_heads", "num_kv_heads", "num_attention_groups", "multi_query_group_num"), 4, 2),
    _Size(("head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim", "attention_head_dim"), 8, 24),
    _Size(("qk_rope_head_dim", "rope_dim", "rotary_dim"), 8, 8),
    _Size(("kv_lora_rank",), 16, 24),
    _Size(("q_lora_rank",), 24, 32),
    _Size(("linear_num_key_heads",), 4, 2),
    _Size(("linear_num_value_heads",), 8, 4),
    _Size(("linear_key_head_dim",), 8, 24),
    _Size(("linear_value_head_dim",), 8, 12),
    _Size(("mamba_num_heads", "mamba_n_heads"), 8, 12),
    _Size(("mamba_head_dim", "mamba_d_head"), 16, 16),
    _Size(("mamba_d_ssm",), 128, 192),
    _Size(("ssm_state_size", "mamba_d_state", "state_size"), 8, 12),
    _Size(("n_groups", "mamba_n_groups"), 2, 2),
    _Size(("mamba_chunk_size", "chunk_size"), 8, 8),
    _Size(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4, 4),
    _Size(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2, 2),
    _Size(("n_group", "topk_group"), 1, 1),
    _Size(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1, 1),
    _Size(("sliding_window", "attention_chunk_size"), 6, 6),
    _Size(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256, 256),
    _Size(("vocab_size", "vocab_size_per_layer_input"), 96, 96),
    _Size(("num_nextn_predict_layers", "num_kv_shared_layers"), 0, 0),
    _Size(("pad_token_id",), 0, 0),
    _Size(("bos_token_id",), 1, 1),
    _Size(("eos_token_id",), 2, 2),
)
"""Fields of configs that mean the same, and their values in the two configs."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Fields with one entry per block."""

_MOST_LAYERS = 4
"""A config with at most so many layers keeps them."""

_MOST_PARAMETERS = 100_000_000
"""A model that is larger is not built: fields that are not in the table set its sizes."""

_HEADS = ("num_key_value_heads", "num_kv_heads")


def default_config(model_type: str) -> PretrainedConfig:
    """Return the config of a model type of transformers with the defaults of its class.

    Raises:
        ModelError: the defaults do not fit each other.
    """
    try:
        return CONFIG_MAPPING[model_type]()
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ModelError(
            f"{CONFIG_MAPPING[model_type].__name__} can't be made without arguments: {_in_one_line(error)}; name a "
            "config.json"
        ) from error


def small_configs(config: PretrainedConfig) -> tuple[PretrainedConfig, PretrainedConfig | None]:
    """Return two small configs like `config`; None in place of the second if no model of these sizes runs.

    Raises:
        ModelError: no model of the first sizes runs on a CPU, perhaps since fields that are not in the table have to fit.
    """
    first, error = _that_runs(config, second=False)
    if first is None:
        raise ModelError(
            f"no small {type(config).__name__} runs: {error}; name a function that returns a small model, as in "
            "titanplans derive my_models:small_model"
        )
    return first, _that_runs(config, second=True)[0]


def _that_runs(config: PretrainedConfig, *, second: bool) -> tuple[PretrainedConfig | None, str]:
    reason = ""
    for fields in _variants(config, second=second):
        try:
            small = type(config).from_dict(config.to_dict() | fields)
            count = sum(parameter.numel() for parameter in modeling.build(small).parameters())
            if count > _MOST_PARAMETERS:
                reason = (
                    reason
                    or f"it has {count:,} parameters, because fields that titanplans does not shrink set its size"
                )
                continue
            model = modeling.build_real(small, dtype=torch.float32)
            with torch.no_grad():
                logits = model(input_ids=torch.randint(3, 96, (2, 16))).logits
        except (
            UserError,
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            StrictDataclassError,
        ) as error:
            reason = reason or _in_one_line(error)
            continue
        if torch.isfinite(logits).all():
            return small, ""
        reason = reason or "its logits are not finite"
    return None, reason


def _in_one_line(error: Exception) -> str:
    # The first line of a StrictDataclassError names the method that validates the config, the second one what is wrong.
    is_strict = isinstance(error, StrictDataclassError)
    message = " ".join(str(error).splitlines()[1 if is_strict else 0 :])
    message = textwrap.shorten(message, 200, placeholder=" ...")
    return message if is_strict or isinstance(error, UserError) else f"{type(error).__name__}: {message}"


def _variants(config: PretrainedConfig, *, second: bool) -> Iterator[dict[str, Any]]:
    """Yield fields to try: the table's; then wider heads, as many key/value heads as query heads, no head size."""
    fields = _fields(config.to_dict(), second=second)
    yield fields
    if "head_dim" in fields:  # of a mixer that is twice as wide as the residual stream
        yield fields | {"head_dim": 2 * fields["head_dim"]}
    heads = next((fields[name] for name in ("num_attention_heads", "num_heads") if name in fields), None)
    equal = {name: heads for name in _HEADS if name in fields and heads is not None}
    yield fields | equal
    without = {name: value for name, value in fields.items() if name != "head_dim"}
    yield without | {"head_dim": None}
    yield without | equal | {"head_dim": None}


def _fields(known: dict[str, Any], *, second: bool) -> dict[str, Any]:
    """Return the fields to change in a config with these fields, and in the configs inside it."""
    fields: dict[str, Any] = {
        name: value | _fields(value, second=second)
        for name, value in known.items()
        if isinstance(value, dict) and "model_type" in value
    }
    for size in _SIZES:
        for name in size.names:
            value, old = (size.second if second else size.first), known.get(name)
            if (
                name not in known
                or isinstance(old, bool | dict)
                or (old is None and name == "sliding_window")
            ):
                continue
            fields[name] = [value] * len(old) if isinstance(old, list) else value
    fields |= {name: 0.0 for name, value in known.items() if "drop" in name and isinstance(value, float)}
    layers = next((known[name] for name in _LAYERS if name in known), 0)
    if layers <= _MOST_LAYERS:  # other fields may name its layers, such as per_layer_config of Gemma 4
        return fields
    kinds = {name: known[name] for name in _KINDS if isinstance(known.get(name), list) and known[name]}
    count = max([2, *(len(dict.fromkeys(entries)) for entries in kinds.values())])
    for name, entries in known.items():
        if name in kinds:
            fields[name] = (list(dict.fromkeys(entries)) * count)[:count]
        elif isinstance(entries, list) and len(entries) == layers:
            fields[name] = fields.get(name, entries)[:count]
        elif isinstance(entries, dict) and entries and all(str(key).isdecimal() for key in entries):
            fields[name] = {key: value for key, value in entries.items() if int(key) < count}
    return fields | {name: count for name in _LAYERS if name in known}
