"""The plan of Mamba 2, split by heads (Dao and Gu 2024, arXiv:2405.21060)."""

from typing import Any

from torch.nn.functional import silu

from titanplans import Plan, register_plan

from .mamba import UNFUSED
from .transformer import TransformerPlan


@register_plan("mamba2", mixer="fla.layers.mamba2.Mamba2")
class Mamba2Plan(TransformerPlan):
    """One projection to gate, x, B, C and step size; a convolution over x, B and C; a gated norm.

    The heads of a group share B and C. If there are fewer groups than ranks, several ranks share a group. The norm is over
    each group's width.
    """

    def attn_plan(self, attn: Any) -> Plan:
        width, groups = attn.intermediate_size, attn.n_groups
        shared = self.shared_heads(groups * attn.ssm_state_size, groups)
        statistic = None if attn.norm_before_gate else gated_input
        norm = {"norm": self.split_norm(statistic=statistic, groups=groups)} if attn.rmsnorm else {}
        return {
            **self.attn_region(arguments=UNFUSED, may_gather=True),
            "in_proj": self.packed(width, width, shared, shared, *self.rows_by_head(attn)),
            "conv1d": self.packed(width, shared, shared),
            "A_log": self.colwise(),
            "D": self.colwise(),
            "dt_bias": self.colwise(),
            **norm,
            "out_proj": self.rowwise(reduce_output=False),
        }

    def rows_by_head(self, attn: Any) -> tuple[int, ...]:
        """Return the last sections of `in_proj`, whose rows belong to heads."""
        return (attn.num_heads,)

    def local_attributes(self, attn: Any) -> dict[str, int]:
        groups = self.heads_per_rank(attn.n_groups)
        local = self.divide_by_degree(attn, "num_heads", "intermediate_size") | {"n_groups": groups}
        channels = local["intermediate_size"] + 2 * groups * attn.ssm_state_size
        norm = {"norm.group_size": local["intermediate_size"] // groups} if attn.rmsnorm else {}
        return local | norm | {"conv_dim": channels, "conv1d.groups": channels}


@register_plan("log_linear_mamba2", mixer="fla.layers.log_linear_mamba2.LogLinearMamba2")
class LogLinearMamba2Plan(Mamba2Plan):
    """The projection also makes a scale for each level of each head's states (Guo et al. 2025, arXiv:2506.04761)."""

    def rows_by_head(self, attn: Any) -> tuple[int, ...]:
        return (attn.num_heads, attn.num_heads * attn.num_lambda_dims)

    def attn_plan(self, attn: Any) -> Plan:
        return super().attn_plan(attn) | {"L": self.colwise()}


def gated_input(x, z):
    """Return the tensor whose root mean square the norm divides by: the gated input."""
    return x * silu(z)
