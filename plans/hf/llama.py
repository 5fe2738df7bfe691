"""The plan of the plain dense decoder of transformers: Llama, Mistral, and all that keep its names."""

from torch import nn

from titanplans import Plan, TPPlan, register_plan


@register_plan("llama", "mistral")
class LlamaPlan(TPPlan):
    """Heads and MLP width are split, norms replicated."""

    def attn_plan(self, attn: nn.Module) -> Plan:
        return {
            **self.attn_input(),
            "q_proj": self.colwise(),
            "k_proj": self.kv_colwise(attn),
            "v_proj": self.kv_colwise(attn),
            "o_proj": self.rowwise(),
        }
