"""The plan of native sparse attention, split by heads (Yuan et al. 2025, arXiv:2502.11089)."""

from torch import nn

from titanplans import Plan, register_plan

from .mixer import MixerPlan


@register_plan("nsa", mixer="fla.layers.nsa.NativeSparseAttention")
class NSAPlan(MixerPlan):
    """The query heads of a key/value head select blocks together, so ranks can't share a key/value head."""

    shared_head_names = ()
    head_names = ("num_kv_heads",)
    by_head = ("q_proj", "k_proj", "v_proj")

    def attn_plan(self, attn: nn.Module) -> Plan:
        # Three gates per head are adjacent.
        return super().attn_plan(attn) | {"g_proj": self.colwise(interleaved=True)}
