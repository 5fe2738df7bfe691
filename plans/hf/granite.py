"""The plans of Granite's mixtures, Bamba and Falcon-H1: Mamba 2 as transformers implements it, next to attention."""

from typing import Any

from torch.nn.functional import silu

from titanplans import Plan, register_plan

from .experts import ExpertsPlan
from .llama import LlamaPlan


@register_plan("bamba")
class BambaPlan(LlamaPlan):
    """Mamba 2 is split by heads. Heads of a group share B and C, and so do ranks if there are fewer groups than ranks."""

    shared_head_names = ("n_groups", "num_key_value_heads")

    def attn_plan(self, attn: Any) -> Plan:
        if not hasattr(attn, "A_log"):
            return super().attn_plan(attn)
        gate, *convolved, step = self.sections(attn)
        return {
            **self.attn_input(may_gather=True),  # the mixer's code sets padding to zero
            "in_proj": self.packed(gate, *convolved, step),
            "conv1d": self.packed(*convolved),
            "A_log": self.colwise(),
            "D": self.colwise(),
            "dt_bias": self.colwise(),
            **self.norm_plan(attn),
            "out_proj": self.rowwise(),
        }

    def sections(self, attn: Any) -> tuple[Any, ...]:
        """Return the sections of `in_proj`: gate, x, B, C and step size."""
        width, groups = attn.intermediate_size, attn.n_groups
        shared = self.shared_heads(groups * attn.ssm_state_size, groups)
        return width, width, shared, shared, attn.num_heads

    def norm_plan(self, attn: Any) -> Plan:
        """Plan the gated norm of Mamba 2, which is over each group's width."""
        return {"norm": self.split_norm(statistic=gated_input, groups=attn.n_groups)}

    def local_attributes(self, attn: Any) -> dict[str, int]:
        if not hasattr(attn, "A_log"):
            return {}
        groups = self.heads_per_rank(attn.n_groups)
        local = self.divide_by_degree(attn, "num_heads", "intermediate_size") | {"n_groups": groups}
        width = local["intermediate_size"]
        return (
            local
            | {"conv_dim": width + 2 * groups * attn.ssm_state_size}
            | self.norm_attributes(attn, width, groups)
        )

    def norm_attributes(self, attn: Any, width: int, groups: int) -> dict[str, int]:
        """Return the local attributes of the norm, for a rank's width and groups."""
        return {"norm.group_size": width // groups}

    def local_functions(self, attn: Any) -> dict[str, Any]:
        return {"mamba2_split_conv1d_scan_combined": self.without_kernel} if hasattr(attn, "A_log") else {}


def gated_input(x, gate):
    """Return the tensor whose root mean square the norm divides by: the gated input."""
    return x * silu(gate)


@register_plan("falcon_h1")
class FalconH1Plan(BambaPlan):
    """Each block has Mamba 2 and attention, which get the same input. `mup_vector` scales the rows of `in_proj`."""

    def attn_plan(self, attn: Any) -> Plan:
        plan = super().attn_plan(attn)
        if not hasattr(attn, "A_log"):
            return plan
        return plan | {"mup_vector": self.packed(*self.sections(attn), dim=2)}

    def norm_plan(self, attn: Any) -> Plan:
        if not attn.mamba_rms_norm:
            return {}
        statistic = None if attn.norm.norm_before_gate else gated_input
        return {"norm": self.split_norm(statistic=statistic, groups=attn.n_groups)}

    def norm_attributes(self, attn: Any, width: int, groups: int) -> dict[str, int]:
        return {"norm.n_groups": groups} if attn.mamba_rms_norm else {}


@register_plan("granitemoe", "granitemoeshared")
class GraniteMoePlan(ExpertsPlan):
    """The mixture is `block_sparse_moe`; a shared MLP with gate and up in one projection may be next to it."""

    router = "router"

    def mlp_plan(self, mlp: Any) -> Plan:
        if not hasattr(mlp, "input_linear"):
            return super().mlp_plan(mlp)
        width = mlp.output_linear.in_features
        return {
            **self.mlp_input("hidden_states"),
            "input_linear": self.packed(width, width),
            "output_linear": self.rowwise(),
        }


@register_plan("granitemoehybrid")
class GraniteHybridPlan(GraniteMoePlan, BambaPlan):
    """Blocks have either Mamba 2 or attention."""
