"""The registered plans, and models of the zoo in odd sizes with every config option that changes a style of the plan.

    registered     model here     new in its plan, compared with the plans above
    transformer    itself         biases, q/k norms, residual mixing
    gla            itself         a mixer with short convolutions and an output gate
    llama          itself         biases in every projection
    mistral        llama          nothing, because the plan is the same class
    qwen2          itself         tied weights
    qwen3          itself         q/k norms
    gemma3_text    itself         four norms, windows, soft caps, tied and scaled embedding
    gemma3         itself         vision tower, projector, images

If two plans have the same style at a key, mutants are made only for the first plan (tests/support/mutants/corpus.py). All
models except the last have two blocks with a hidden size of 32, four heads and two key/value heads; at tp 4, two ranks
share a key/value head. Neither 2 nor 4 divides the vocabulary size of 51 or the MLP width of 47.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from tests import zoo
from titanplans import TPPlan, registered_plans
from titanplans.modeling import sample_inputs
from titanplans.proof.batches.conditions import MicroBatch, Scenario
from titanplans.proof.batches.sample import Sampler, randomise
from titanplans.proof.compare.reference import ReferenceRun

VOCABULARY, WIDTH, SEQUENCE = 51, 32, 8
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 47}
_FLA = {**_SIZES, "num_heads": 4, "num_kv_heads": 2}
_HF = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
_GEMMA = {
    **_HF,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass(frozen=True)
class Architecture:
    """A registered plan and its tiny model."""

    name: str
    fields: dict[str, Any] = field(hash=False)
    """Fields of the config that differ from the zoo's."""
    eager: bool = False
    """Use transformers' eager attention, which takes the number of heads from attributes and has a soft cap."""

    @property
    def plan(self) -> type[TPPlan]:
        return registered_plans()[self.name]

    def build(self) -> nn.Module:
        """Return the model, with weights, in float64."""
        model = zoo.build(self.name, **self.fields)
        if self.eager:
            model.set_attn_implementation("eager")
        return model

    @cache  # noqa: B019 -- only the few frozen instances of this module are cached
    def reference(self) -> ReferenceRun:
        """Return the run of the unsplit model. It is computed once for all mutants of the architecture."""
        model = self.build()
        randomise(model, seed=0)
        inputs = None
        if self.name == "gemma3":
            inputs = sample_inputs(model.config, batch_size=2, seq_len=SEQUENCE, seed=0)  # type: ignore[arg-type]
        scenario = Scenario(((MicroBatch(2, SEQUENCE),),))
        return ReferenceRun(model, scenario, Sampler(model, inputs, 1, 0), recording=True)


ARCHITECTURES = (
    Architecture("transformer", {**_FLA, "attnres_block_size": 2}),
    Architecture("gla", _FLA),
    Architecture("llama", {**_HF, "head_dim": 8}, eager=True),
    Architecture("qwen2", {**_HF, "tie_word_embeddings": True}),
    Architecture("qwen3", {**_HF, "head_dim": 8, "tie_word_embeddings": False}),
    Architecture("gemma3_text", _GEMMA, eager=True),
    Architecture(
        "gemma3",
        _GEMMA
        | {
            "num_hidden_layers": 1,
            "layer_types": ["sliding_attention"],
            "vision_config": _VISION | {"image_size": 8, "patch_size": 4, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "boi_token_index": VOCABULARY - 3,
            "eoi_token_index": VOCABULARY - 2,
            "image_token_index": VOCABULARY - 1,
        },
        eager=True,
    ),
)
