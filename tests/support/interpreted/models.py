"""Tiny models of flash-linear-attention's families, in float32, and their inputs."""

from typing import Any

import torch
from transformers import PretrainedConfig

from tests import zoo
from titanplans import modeling
from titanplans.modeling.samples import build_real, sample_inputs
from titanplans.training.trainer.documents import BY_CU_SEQLENS

_OTHER_SIZES: dict[str, dict[str, Any]] = {
    "path_attn": dict(num_heads=4),  # the head size has to be 16, 32, 64 or 128
    "log_linear_mamba2": dict(state_size=64),  # has to be a multiple of 64
    "nsa": dict(block_size=16, block_counts=4),  # there have to be more blocks than are selected
}
"""Sizes for families whose kernels refuse the zoo's sizes."""
NO_CACHE = {
    "deltaformer": "FLA's layer refuses a cache",
    "stickbreaking_attn": "FLA's layer refuses a cache",
    "nsa": "FLA's kernel accesses queries out of bounds if they are fewer than the keys",
    "log_linear_mamba2": "kernel and stand-in store their states in different formats",
    "path_attn": "FLA's kernel accepts a cache only in inference mode",
}
"""Families that have no cache, or whose kernel and stand-in can't use each other's cache."""
ONE_AT_A_TIME = ("forgetting_transformer", "mom", "yoco")
"""Families that continue from a cache only one token at a time, and without gradients."""
LENGTHS = (30, 64, 130)
"""Sequence lengths: below, equal to and above the length of a chunk, which is 64 tokens or fewer."""
DOCUMENTS = (1, 3, 63, 63)


def variants(name: str) -> tuple[dict[str, Any], ...]:
    """Return the config fields of each tiny model of a family."""
    all_fields = zoo.FAMILIES.get(name) or (zoo.fields(name),)
    return tuple(fields | _OTHER_SIZES.get(name, {}) for fields in all_fields)


def families() -> list[str]:
    """Return the model types whose code is FLA's."""
    names = [*zoo.ARCHITECTURES, *zoo.FAMILIES]
    return [name for name in names if type(modeling.load_config(name, "debug")).__module__.startswith("fla.")]


def build(name: str, fields: dict[str, Any]) -> Any:
    """Return a tiny model in float32."""
    return build_real(modeling.load_config(name, "debug", **fields), dtype=torch.float32)


def inputs(config: PretrainedConfig, length: int, *, sequences: int = 1) -> dict[str, torch.Tensor]:
    """Return tokens, with the same tokens as labels."""
    batch = sample_inputs(config, batch_size=sequences, seq_len=length, seed=0)
    return batch | {"labels": batch["input_ids"]}


def packed(config: PretrainedConfig) -> dict[str, torch.Tensor] | None:
    """Return documents packed into one sequence; None for a family that ignores document boundaries."""
    if config.model_type not in BY_CU_SEQLENS:
        return None
    ends = torch.tensor((0, *DOCUMENTS)).cumsum(0)
    return inputs(config, int(ends[-1])) | {"cu_seqlens": ends.to(torch.int32)}
