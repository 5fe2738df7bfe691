"""The plan of Comba, its heads split (Hu et al. 2025, arXiv:2506.02475)."""

from titanplans import register_plan

from .gated_deltanet import GatedDeltaNetPlan


@register_plan("comba", mixer="fla.layers.comba.Comba")
class CombaPlan(GatedDeltaNetPlan):
    """As Gated DeltaNet; what corrects queries and keys is split with them."""

    by_shared_head = (*GatedDeltaNetPlan.by_shared_head, "decay", "D")
