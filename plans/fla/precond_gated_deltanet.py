"""The plan of preconditioned Gated DeltaNet, split by heads (arXiv:2604.21100)."""

from titanplans import register_plan

from .gated_deltanet import GatedDeltaNetPlan


@register_plan("precond_gated_deltanet", mixer="fla.layers.precond_gated_deltanet.PrecondGatedDeltaNet")
class PrecondGatedDeltaNetPlan(GatedDeltaNetPlan):
    """Like Gated DeltaNet; the preconditioner's parameters are split like the keys."""

    by_shared_head = (
        *GatedDeltaNetPlan.by_shared_head,
        *("a_atk_proj", "b_atk_proj", "A_log_atk", "dt_bias_atk", "log_atk_scale"),
    )
