"""The plans of dense decoders whose MLP has no gate: StarCoder2, Nemotron-4, Phi, Apertus and others."""

from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .llama import LlamaPlan
from .qwen import Qwen3Plan


@register_plan("starcoder2")
class Starcoder2Plan(LlamaPlan):
    """The MLP's projections have other names; all projections have biases."""

    mlp_in = ("c_fc",)
    mlp_out = "c_proj"


@register_plan("arcee", "nemotron", "jais2")
class ArceePlan(LlamaPlan):
    """The MLP squares its activations."""

    mlp_in = ("up_proj",)


@register_plan("apertus")
class ApertusPlan(Qwen3Plan):
    """The MLP's activation has two trained parameters for its full width."""

    mlp_in = ("up_proj",)

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        return super().mlp_plan(mlp) | {"act_fn": self.replicated_in_region()}


@register_plan("nanochat")
class NanoChatPlan(LlamaPlan):
    """Embeddings are normed before the first block, and queries and keys after rotation, all without weights."""

    mlp_in = ("fc1",)
    mlp_out = "fc2"

    def model_plan(self, model: nn.Module) -> Plan:
        return super().model_plan(model) | {"model.embed_tokens": self.vocab_embedding(all_tokens=True)}


@register_plan("phi")
class PhiPlan(LlamaPlan):
    """Attention and MLP are parallel; all projections have biases. Queries and keys may be normed head by head."""

    attn_out = "dense"
    mlp_in = ("fc1",)
    mlp_out = "fc2"

    def attn_plan(self, attn: Any) -> Plan:
        norms = ("q_layernorm", "k_layernorm") if attn.qk_layernorm else ()
        return super().attn_plan(attn) | dict.fromkeys(norms, self.replicated_in_region())
