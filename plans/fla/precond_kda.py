"""The plan of preconditioned Kimi Delta Attention, split by heads (arXiv:2604.21100)."""

from titanplans import register_plan

from .kda import KDAPlan


@register_plan("precond_kda", mixer="fla.layers.precond_kda.PrecondKDA")
class PrecondKDAPlan(KDAPlan):
    """Like Kimi Delta Attention; the preconditioner is split by value heads, and betas by key heads."""

    by_head = (*KDAPlan.by_head, "a_proj", "b_atk_proj", "A_log_atk", "dt_bias_atk", "log_atk_scale")
    by_shared_head = (*KDAPlan.by_shared_head, "b_proj")
