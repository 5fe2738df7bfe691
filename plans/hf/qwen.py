"""The plans of Qwen2 (and 2.5) and Qwen3: a Llama with biases on q, k, v, or with norms over each head."""

from torch import nn

from titanplans import Plan, register_plan

from .llama import LlamaPlan


@register_plan("qwen2")
class Qwen2Plan(LlamaPlan):
    """The biases are split with their projections."""


@register_plan("qwen3", "exaone4")
class Qwen3Plan(LlamaPlan):
    """`head_norms` have one weight for all heads, so each rank's gradient of this weight covers only the rank's heads."""

    head_norms: tuple[str, ...] = ("q_norm", "k_norm")

    def attn_plan(self, attn: nn.Module) -> Plan:
        return super().attn_plan(attn) | dict.fromkeys(self.head_norms, self.replicated_in_region())
