"""The plan of Llama 4's text model: one expert per token, and a shared one."""

from titanplans import register_plan

from .experts import ExpertsPlan


@register_plan("llama4_text")
class Llama4Plan(ExpertsPlan):
    """Queries and keys are normed head by head, without weights."""

    router = "router"
    shared_mlp = "shared_expert"
