"""The plan of Comba, split by heads (Hu et al. 2025, arXiv:2506.02475)."""

from titanplans import register_plan

from .gated_deltanet import GatedDeltaNetPlan


@register_plan("comba", mixer="fla.layers.comba.Comba")
class CombaPlan(GatedDeltaNetPlan):
    """Like Gated DeltaNet; the parameters that correct queries and keys are split in the same way."""

    by_shared_head = (*GatedDeltaNetPlan.by_shared_head, "decay", "D")
