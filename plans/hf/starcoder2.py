"""The plan of StarCoder2: a Llama whose MLP has no gate."""

from titanplans import register_plan

from .llama import LlamaPlan


@register_plan("starcoder2")
class Starcoder2Plan(LlamaPlan):
    """The MLP's projections have other names; all projections have biases."""

    mlp_in = ("c_fc",)
    mlp_out = "c_proj"
