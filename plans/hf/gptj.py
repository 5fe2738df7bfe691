"""The plans of GPT-J and CodeGen: attention and MLP are parallel, after one norm."""

from torch import nn

from titanplans import Plan, register_plan

from .llama import LlamaPlan


@register_plan("gptj")
class GPTJPlan(LlamaPlan):
    """Projections of attention have no biases; projections of the MLP have biases."""

    attn_out = "out_proj"
    mlp_in = ("fc_in",)
    mlp_out = "fc_out"


@register_plan("codegen")
class CodeGenPlan(GPTJPlan):
    """Queries, values and keys are one projection, in `mp_num` = 4 sections of a query, a value and a key each.

    Ranks have complete sections, so at most 4 ranks split the heads.
    """

    head_names = ("mp_num",)

    def attn_plan(self, attn: nn.Module) -> Plan:
        return {
            **self.attn_input(),
            "qkv_proj": self.colwise(interleaved=True),
            "out_proj": self.rowwise(),
        }
