"""The plans of Mamba and of Samba, the mixer's channels split (Gu and Dao 2023, arXiv:2312.00752)."""

from typing import Any

from titanplans import Plan, register_plan

from .transformer import TransformerPlan

UNFUSED = {"use_cache": True}
"""With a cache or without, the mixer then calls its modules, not one kernel of all of them, on which no rank could sum."""


@register_plan("mamba", mixer="fla.layers.mamba.Mamba")
class MambaPlan(TransformerPlan):
    """Each channel has a state of its own, so channels are split; step size, B and C are made of all of them."""

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
        return self.divided(attn, "intermediate_size", "conv1d.groups")


@register_plan("samba")
class SambaPlan(MambaPlan):
    """Mamba and softmax attention in turns, with MLPs."""
