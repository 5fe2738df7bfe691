"""The plan of the Forgetting Transformer, split by heads (Lin et al. 2025, arXiv:2503.02130)."""

from torch import nn

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("forgetting_transformer", mixer="fla.layers.forgetting_attn.ForgettingAttention")
class ForgettingTransformerPlan(MixerPlan):
    """`f_proj` is a forget gate per head. Queries and keys are normed per head, each head with its own weights."""

    by_head = ("q_proj", "q_norm", "f_proj", "g_proj")
    by_shared_head = ("k_proj", "k_norm", "v_proj")

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        attributes = super().local_attributes(attn)
        if attn.qk_norm:
            heads = {"q_norm.num_groups": attn.num_heads, "k_norm.num_groups": attn.num_kv_heads}
            attributes |= {name: self.heads_per_rank(count) for name, count in heads.items()}  # type: ignore[arg-type]
        return attributes
