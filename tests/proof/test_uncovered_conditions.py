"""The full table of conditions in which a registered architecture can't be proved, and why."""

import re

import pytest

from tests import zoo
from titanplans import kernels, registered_plans
from titanplans.proof.batches.sample import Sampler
from titanplans.proof.compare.refused import leave_out_what_is_refused

_PADDING = "padding: its forward refuses an attention_mask in training"
_PACKED = "documents in a sequence: its forward refuses cu_seqlens"
_NO_PACKING = (
    "documents in a sequence: its forward takes no cu_seqlens or position_ids, or the sequence comes first"
)
_CACHE = "a forward with a cache: its forward refuses use_cache"
_NO_CACHE = "a forward with a cache: its forward takes no use_cache"
_CACHE_ALONE = "a cache without padding: its forward refuses use_cache"
_PADDED_CACHE = "padding with a cache: its forward refuses use_cache"
_CAT_PADDING = (
    "ValueError: CAT only supports `attention_mask=None` or all-ones masks; padded batches are not supported. "
    "(fla.models.cat.modeling_cat)"
)

UNREACHED = {
    "abc": [
        f"{_PACKED}: NotImplementedError: Training with cu_seqlens is not supported yet for ABCAttention (fla.layers.abc)"
    ],
    "bloom": [_NO_PACKING],
    "cat": [
        f"{_PADDING}: {_CAT_PADDING}",
        f"{_PACKED}: ValueError: CAT does not support variable-length `cu_seqlens` inputs yet; use fixed-length batches. "
        "(fla.models.cat.modeling_cat)",
        "a cache without padding: its forward returns no cache called cache, past_key_values or cache_params",
        f"{_PADDED_CACHE}: {_CAT_PADDING}",
    ],
    "deltaformer": [
        f"{_CACHE}: NotImplementedError: DeltaFormerAttention does not support `past_key_values` (fla.layers.deltaformer)"
    ],
    "falcon_mamba": [_NO_PACKING],
    "forgetting_transformer": [
        f"{_CACHE_ALONE}: AssertionError: only support q_len == kv_len when attention_mask is None "
        "(fla.layers.forgetting_attn)"
    ],
    "granitemoe": [_NO_CACHE],
    "granitemoe_swa": [_NO_CACHE],
    "granitemoeshared": [_NO_CACHE],
    "granitemoehybrid": [_NO_CACHE, "documents in a sequence: position_ids change nothing in its forward"],
    "linear_attn": ["documents in a sequence: cu_seqlens change nothing in its forward"],
    "log_linear_mamba2": [_NO_PACKING],
    "mamba": [_NO_PACKING],
    "mamba2": [_NO_PACKING],
    "mpt": [_NO_PACKING],
    "path_attn": [
        f"{_PADDING}: AssertionError: attention mask is not supported in training. Please use variable length input. "
        "(fla.layers.path_attn)",
        f"{_CACHE_ALONE}: AssertionError: use_cache should be False in training (fla.layers.path_attn)",
    ],
    "stickbreaking_attn": [
        f"{_CACHE}: NotImplementedError: Stick-breaking attention does not support KV-cache decoding. Use "
        "use_cache=False. (fla.models.stickbreaking_attn.modeling_stickbreaking_attn)"
    ],
    "wall_transformer": [
        f"{_PADDED_CACHE}: AssertionError: attention_mask should not be provided when past_key_values has content "
        "(fla.layers.wall_attn)"
    ],
}
"""All other architectures are proved with padding, documents, and a cache with and without padding. The table has no line
    numbers."""


@pytest.mark.parametrize("name", sorted(registered_plans()))
def test_the_conditions_in_which_an_architecture_is_not_proved(name):
    kernels.install("cpu")
    model = zoo.build(name).double()  # a router may keep a type of its own
    sampler = Sampler(model, None, 1, seed=0)
    reasons = [*sampler.uncovered, *leave_out_what_is_refused(model, sampler)]
    assert [re.sub(r":\d+\)$", ")", reason) for reason in reasons] == UNREACHED.get(name, [])
