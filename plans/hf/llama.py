"""The plan of the plain dense decoder of transformers: Llama, Mistral, and all models with the same module names.

Other models may add modules on the stream or outside of it: more norms, parallel attention and MLP, multipliers, soft caps
of logits, layers without rotary positions, windows.
"""

from torch import nn

from titanplans import Plan, TPPlan, register_plan


@register_plan(
    "llama",
    "mistral",
    "ministral",
    "ministral3",
    "gemma",
    "gemma2",
    "vaultgemma",
    "cohere",
    "cohere2",
    "smollm3",
    "granite",
    "helium",
    "olmo",
    "ernie4_5",
    "cwm",
    "seed_oss",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
)
class LlamaPlan(TPPlan):
    """Heads and MLP width are split, norms are replicated."""

    attn_out: str = "o_proj"
    """The projection of attention back to the hidden size."""

    def attn_plan(self, attn: nn.Module) -> Plan:
        return {
            **self.attn_input(),
            "q_proj": self.colwise(),
            "k_proj": self.kv_colwise(attn),
            "v_proj": self.kv_colwise(attn),
            self.attn_out: self.rowwise(),
        }
