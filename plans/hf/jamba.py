"""The plans of Jamba and Falcon Mamba: Mamba as transformers implements it, alone or next to attention and experts."""

from typing import Any

from titanplans import Plan, register_plan

from .experts import ExpertsPlan


class ChannelsPlan(ExpertsPlan):
    """Each channel has its own state, so channels are split; step size, B and C are computed from all channels."""

    def heads(self, attn: Any) -> dict[str, int]:
        return (
            {"intermediate_size": attn.intermediate_size} if hasattr(attn, "A_log") else super().heads(attn)
        )

    def attn_plan(self, attn: Any) -> Plan:
        if not hasattr(attn, "A_log"):
            return super().attn_plan(attn)
        width = attn.intermediate_size
        return {
            **self.attn_input(may_gather=True),  # the mixer's code sets padding to zero
            "in_proj": self.packed(width, width),
            "conv1d": self.colwise(),
            "x_proj": self.rowwise_in_region(),
            "dt_proj": self.colwise(),
            "A_log": self.colwise(),
            "D": self.colwise(),
            "out_proj": self.rowwise(),
        }

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return self.divide_by_degree(attn, "intermediate_size") if hasattr(attn, "A_log") else {}


@register_plan("falcon_mamba")
class FalconMambaPlan(ChannelsPlan):
    """Mamba alone, without MLPs."""

    def local_functions(self, attn: Any) -> dict[str, Any]:
        # With mamba-ssm, the kernel of a training step contains x_proj and out_proj, too.
        return {"mamba_inner_fn": self.without_kernel}


@register_plan("jamba")
class JambaPlan(ChannelsPlan):
    """Step size, B and C are normed. Blocks alternate between Mamba and attention, and between MLPs and experts."""

    router = "router"

    def attn_plan(self, attn: Any) -> Plan:
        norms = ("dt_layernorm", "b_layernorm", "c_layernorm") if hasattr(attn, "A_log") else ()
        return super().attn_plan(attn) | dict.fromkeys(norms, self.replicated_in_region())
