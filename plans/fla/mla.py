"""The plan of multi-head latent attention, split by heads (DeepSeek-AI 2024, arXiv:2405.04434)."""

from torch import nn

from titanplans import Plan, register_plan

from .mixer import MixerPlan


@register_plan("mla", mixer="fla.layers.mla.MultiheadLatentAttention")
class MLAPlan(MixerPlan):
    """Queries are one low-rank product, keys and values another; all heads share the rotary part of the keys.

    If the config sets no rank for the queries, `q_proj` is one Linear.
    """

    may_gather = True
    by_head = ("q_proj.2", "kv_proj.2")
    replicated = ("q_proj.0", "q_proj.1", "kv_proj.0", "kv_proj.1", "k_rope")
    counts = ("num_heads",)

    def attn_plan(self, attn: nn.Module) -> Plan:
        plan = super().attn_plan(attn)
        return plan if attn.q_lora_rank is not None else plan | {"q_proj": self.colwise()}
