"""Several documents in one sequence that do not see each other: which models can keep them apart, and by which keyword.

That a forward takes the keyword doesn't say so: recurrences of transformers and some of flash-linear-attention run on across
the borders, and GPT-OSS rotates by `position_ids` but doesn't mask by them. So these are the model types of which a test has
seen that a change in one document changes nothing in the next.
"""

import logging

import torch
from transformers import PretrainedConfig

from titanplans.config import ConfigError, JobConfig
from titanplans.training.job.resolve import training_data

_log = logging.getLogger(__name__)

BY_CU_SEQLENS = frozenset((
    "bitnet", "comba", "cyclic_flow_attention", "delta_net", "deltaformer", "forgetting_transformer",
    "gated_deltanet", "gated_deltaproduct", "gla", "gsa", "hgrn", "hgrn2", "kda", "lightnet", "mesa_net",
    "mla", "moba", "nsa", "parallax", "path_attn", "precond_gated_deltanet", "precond_kda", "raven",
    "retnet", "rodimus", "rwkv6", "rwkv7", "stickbreaking_attn", "transformer", "wall_transformer", "yoco",
))  # fmt: skip
"""Of flash-linear-attention: all sequences of a batch, one after another in one row, and where each begins."""

BY_POSITION_IDS = frozenset((
    "cohere2", "deepseek_v2", "deepseek_v3", "gemma2", "gemma3", "gemma3_text", "glm4", "glm4_moe",
    "gpt2", "gpt_neox", "granite", "helium", "llama", "llama4_text", "mistral", "mixtral", "olmo2",
    "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm",
    "starcoder2",
))  # fmt: skip
"""Of transformers: positions that restart, from which it makes the masks of eager attention, SDPA and FlexAttention."""


def keyword(job: JobConfig, config: PretrainedConfig) -> str | None:
    """Return the keyword by which a job's model is told of documents; None where it is to be told nothing, or can't."""
    chats = [source.chat for source in training_data(job).sources]
    texts = not all(chat.enable for chat in chats)
    packed = any(chat.enable and chat.packing for chat in chats)
    if not packed and not (texts and job.data.documents != "joined"):
        return None
    if job.model.class_ is not None:  # whose config may be one of transformers'
        return None
    if config.model_type in BY_CU_SEQLENS:
        return "cu_seqlens"
    # Flash attention by itself looks for documents in a batch of one sequence only.
    flash = "flash" in (getattr(config, "_attn_implementation", None) or "")
    return "position_ids" if config.model_type in BY_POSITION_IDS and not flash else None


def are_apart(job: JobConfig, by: str | None) -> bool:
    """Return whether documents of text are kept apart, in a model that is told of them by the keyword `by`."""
    return job.data.documents != "joined" and by is not None


def check_documents(job: JobConfig, config: PretrainedConfig) -> None:
    """Refuse documents apart, or conversations packed, for a model that does not keep them apart; log which it is.

    Raises:
        ConfigError: its model type is not known to.
    """
    chats, by = [source.chat for source in training_data(job).sources], keyword(job, config)
    kind = repr(config.model_type) if config.model_type else type(config).__name__
    whose = f"{kind} is not known to keep documents of a sequence apart, so each would see those before it"
    if any(chat.enable and chat.packing for chat in chats) and by is None:
        key = "data.sources: chat.packing" if job.data.sources else "training.chat.packing"
        raise ConfigError(
            f"{key} = true: {whose}; set it to false for one conversation a sequence, or use another model"
        )
    if all(chat.enable for chat in chats):
        return
    if job.data.documents == "apart" and by is None:
        raise ConfigError(
            f'data.documents = "apart": {whose}; set it to "joined", or use another model (docs/data.md names them)'
        )
    if are_apart(job, by):
        _log.info("documents of a row are kept apart: none sees another")
    elif job.data.documents is None:
        _log.info(f"documents of a row see those before them: {kind} is not known to keep them apart")


def inputs(tokens: torch.Tensor, positions: torch.Tensor, by: str) -> dict[str, torch.Tensor]:
    """Return the inputs of a forward that keeps documents apart.

    Args:
        tokens: `[B, L]`.
        positions: `[B, L]`, 0 where a document begins, and at the beginning of each row.
        by: "cu_seqlens", for which the rows become one, or "position_ids".
    """
    if by == "position_ids":
        return {"input_ids": tokens, "position_ids": positions}
    starts = (positions.reshape(-1) == 0).nonzero().reshape(-1)
    ends = starts.new_tensor([tokens.numel()])
    return {"input_ids": tokens.reshape(1, -1), "cu_seqlens": torch.cat([starts, ends]).to(torch.int32)}
