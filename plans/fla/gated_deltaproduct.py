"""The plan of Gated DeltaProduct, split by heads (Siems et al. 2025, arXiv:2502.10297)."""

from torch import nn

from titanplans import Plan, register_plan

from .gated_deltanet import GatedDeltaNetPlan
from .mixer import has


@register_plan("gated_deltaproduct", mixer="fla.layers.gated_deltaproduct.GatedDeltaProduct")
class GatedDeltaProductPlan(GatedDeltaNetPlan):
    """Like Gated DeltaNet, with `num_householder` keys, values and betas per token.

    Their rows are ordered as (n h d): n sections, and each section is split by heads.
    """

    def attn_plan(self, attn: nn.Module) -> Plan:
        steps: int = attn.num_householder  # type: ignore[assignment]
        keys = self.packed(*[self.shared_heads(attn.key_dim, attn.num_heads)] * steps)  # type: ignore[arg-type]
        values, betas = (self.packed(*[size] * steps) for size in (attn.value_dim, attn.num_v_heads))  # type: ignore[list-item]
        packed = {"k_proj": keys, "k_conv1d": keys, "v_proj": values, "v_conv1d": values, "b_proj": betas}
        return super().attn_plan(attn) | {name: style for name, style in packed.items() if has(attn, name)}
