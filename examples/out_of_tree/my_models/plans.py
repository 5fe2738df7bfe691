"""The plan of `MyModel`."""

from torch import nn

from titanplans import Plan, TPPlan, register_plan


@register_plan("my_model")
class MyPlan(TPPlan):
    """Split the mixer by heads, and the MLP by its width."""

    mlp_in = ("fc_in",)
    mlp_out = "fc_out"

    def attn_plan(self, attn: nn.Module) -> Plan:
        width = attn.o_proj.in_features
        return {
            **self.attn_input(),
            "qkv_proj": self.packed(width, width, width),
            "decay": self.colwise(),
            "norm": self.replicated_in_region(),
            "o_proj": self.rowwise(),
        }
