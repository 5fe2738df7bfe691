"""The models that can keep documents of one sequence apart, and the keyword of their forward that does it."""

import logging

import torch
from transformers import PretrainedConfig

from titanplans.config import ConfigError, JobConfig
from titanplans.training.job.resolve import training_data

_log = logging.getLogger(__name__)

# A forward that accepts the keyword may still ignore it: recurrences in transformers, and some of flash-linear-attention,
# run across documents; GPT-OSS uses `position_ids` for the rotation but not for the mask. A model type is listed only if a
# test has shown that a change in one document does not affect the next.

BY_CU_SEQLENS = frozenset((
    "bitnet", "comba", "cyclic_flow_attention", "delta_net", "deltaformer", "forgetting_transformer",
    "gated_deltanet", "gated_deltaproduct", "gla", "gsa", "hgrn", "hgrn2", "kda", "lightnet", "mesa_net",
    "mla", "moba", "nsa", "parallax", "path_attn", "precond_gated_deltanet", "precond_kda", "raven",
    "retnet", "rodimus", "rwkv6", "rwkv7", "stickbreaking_attn", "transformer", "wall_transformer", "yoco",
))  # fmt: skip
"""Model types of flash-linear-attention that take `cu_seqlens`: the batch is one sequence, with each document's offset."""

BY_POSITION_IDS = frozenset((
    "cohere2", "deepseek_v2", "deepseek_v3", "gemma2", "gemma3", "gemma3_text", "glm4", "glm4_moe",
    "gpt2", "gpt_neox", "granite", "helium", "llama", "llama4_text", "mistral", "mixtral", "olmo2",
    "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm",
    "starcoder2",
))  # fmt: skip
"""Model types of transformers that derive the mask (eager, SDPA, FlexAttention) from `position_ids` that restart at 0."""


def document_keyword(job: JobConfig, config: PretrainedConfig) -> str | None:
    """Return the keyword with which a job passes documents to the model's forward; None if it is not needed or supported."""
    chats = [source.chat for source in training_data(job).sources]
    texts = not all(chat.enable for chat in chats)
    packed = any(chat.enable and chat.packing for chat in chats)
    if not packed and not (texts and job.data.documents != "joined"):
        return None
    # A user's class may have the config of a listed model, and so its model_type, but not its behaviour.
    if job.model.class_ is not None:
        return None
    if config.model_type in BY_CU_SEQLENS:
        return "cu_seqlens"
    # In transformers, flash attention derives documents from position_ids only for a batch of one sequence.
    flash = "flash" in (getattr(config, "_attn_implementation", None) or "")
    return "position_ids" if config.model_type in BY_POSITION_IDS and not flash else None


def are_apart(job: JobConfig, keyword: str | None) -> bool:
    """Return whether a job keeps documents of text apart; `keyword` is the result of `document_keyword`."""
    return job.data.documents != "joined" and keyword is not None


def check_documents(job: JobConfig, config: PretrainedConfig) -> None:
    """Refuse to keep documents apart, or to pack conversations, with a model that can't; log whether documents are apart.

    Raises:
        ConfigError: the model type is not known to keep documents apart.
    """
    chats = [source.chat for source in training_data(job).sources]
    keyword = document_keyword(job, config)
    model_type = repr(config.model_type) if config.model_type else type(config).__name__
    reason = f"{model_type} is not known to keep the documents of a sequence apart, so each document would see earlier ones"
    if any(chat.enable and chat.packing for chat in chats) and keyword is None:
        option = "data.sources: chat.packing" if job.data.sources else "training.chat.packing"
        raise ConfigError(
            f"{option} = true: {reason}; set it to false for one conversation per sequence, or use another model"
        )
    if all(chat.enable for chat in chats):
        return
    if job.data.documents == "apart" and keyword is None:
        raise ConfigError(
            f'data.documents = "apart": {reason}; set it to "joined", or use a model that docs/data.md names'
        )
    if are_apart(job, keyword):
        _log.info("documents of a sequence are kept apart: no document sees another one")
    elif job.data.documents is None:
        _log.info(
            f"documents of a sequence see earlier documents: {model_type} is not known to keep them apart"
        )


def inputs(tokens: torch.Tensor, positions: torch.Tensor, keyword: str) -> dict[str, torch.Tensor]:
    """Return the inputs of a forward that keeps documents apart.

    Args:
        tokens: `[B, L]`.
        positions: `[B, L]`, 0 at the first token of each document and of each sequence.
        keyword: "position_ids"; or "cu_seqlens", for which the sequences are joined into one of length B * L.
    """
    if keyword == "position_ids":
        return {"input_ids": tokens, "position_ids": positions}
    starts = (positions.reshape(-1) == 0).nonzero().reshape(-1)
    ends = starts.new_tensor([tokens.numel()])
    return {"input_ids": tokens.reshape(1, -1), "cu_seqlens": torch.cat([starts, ends]).to(torch.int32)}
