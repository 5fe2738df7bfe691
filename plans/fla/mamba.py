"""The plans of Mamba and of Samba, split by the mixer's channels (Gu and Dao 2023, arXiv:2312.00752)."""

from typing import Any

from titanplans import Plan, register_plan

from .transformer import TransformerPlan

UNFUSED = {"use_cache": True}
"""Makes the mixer call its modules, with a cache or without, instead of one fused kernel: ranks can't sum inside a
kernel."""


@register_plan("mamba", mixer="fla.layers.mamba.Mamba")
class MambaPlan(TransformerPlan):
    """Each channel has its own state, so channels are split; step size, B and C are computed from all channels."""

    head_names = ("intermediate_size",)

    def attn_plan(self, attn: Any) -> Plan:
        width = attn.intermediate_size
        return {
            **self.attn_region(arguments=UNFUSED),
            "in_proj": self.packed(width, width),
            "conv1d": self.colwise(),
            "x_proj": self.rowwise_in_region(),
            "dt_proj": self.colwise(),
            "A_log": self.colwise(),
            "D": self.colwise(),
            "out_proj": self.rowwise(reduce_output=False),
        }

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return self.divide_by_degree(attn, "intermediate_size", "conv1d.groups")


@register_plan("samba")
class SambaPlan(MambaPlan):
    """Alternating Mamba and softmax attention, with MLPs."""
