"""The plan of Mamba 3, split by heads."""

from typing import Any

from titanplans import Plan, register_plan

from .mixer import has
from .transformer import TransformerPlan


@register_plan("mamba3", mixer="fla.layers.mamba3.Mamba3")
class Mamba3Plan(TransformerPlan):
    """`in_proj` packs gate, x, B and C (both `mimo_rank` times), three numbers per head, and angles for all heads."""

    def attn_plan(self, attn: Any) -> Plan:
        width, groups, heads = attn.intermediate_size, attn.n_groups, attn.num_heads
        b_and_c = [self.shared_heads(groups * attn.ssm_state_size, groups)] * (2 * attn.mimo_rank)
        angles = self.shared_heads(attn.num_rope_angles)
        by_head = ("dt_bias", "B_bias", "C_bias", "D", "mimo_x", "mimo_z", "mimo_o", "norm")
        return {
            **self.attn_region(may_gather=True),
            "in_proj": self.packed(width, width, *b_and_c, heads, heads, heads, angles),
            **{name: self.colwise() for name in by_head if has(attn, name)},
            **{name: self.replicated_in_region() for name in ("B_norm", "C_norm")},
            "out_proj": self.rowwise(reduce_output=False),
        }

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return self.divide_by_degree(attn, "num_heads", "intermediate_size") | {
            "n_groups": self.heads_per_rank(attn.n_groups)
        }
