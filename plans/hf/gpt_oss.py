"""The plan of gpt-oss: experts with biases, gate and up interleaved, and an attention sink for each head."""

from torch import nn

from titanplans import Plan, register_plan

from .experts import ExpertsPlan


@register_plan("gpt_oss")
class GptOssPlan(ExpertsPlan):
    """Sinks are split with their heads."""

    router = "router"

    def attn_plan(self, attn: nn.Module) -> Plan:
        return super().attn_plan(attn) | {"sinks": self.colwise()}

    def mlp_attributes(self, mlp: nn.Module) -> dict[str, int]:
        return {} if self.options.degrees.ep > 1 else self.divide_by_degree(mlp, "experts.intermediate_size")
