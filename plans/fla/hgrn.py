"""The plans of HGRN and HGRN2 (Qin et al. 2023, arXiv:2311.04823; 2024, arXiv:2404.07904)."""

from torch import nn

from titanplans import Plan, register_plan

from .mixer import MixerPlan


@register_plan("hgrn", mixer="fla.layers.hgrn.HGRNAttention")
class HGRNPlan(MixerPlan):
    """Each channel has its own state, so channels are split. The lower bounds of the channels' gates are a parameter of
    the model."""

    head_names = ("input_dim",)
    by_head = ("i_proj", "f_proj", "g_proj", "i_conv1d", "f_conv1d")

    def model_plan(self, model: nn.Module) -> Plan:
        bounds = f"{model.base_model_prefix}.lower_bounds"
        has_bounds = any(name == bounds for name, _ in model.named_parameters())
        return super().model_plan(model) | ({bounds: self.colwise(dim=1)} if has_bounds else {})

    def attn_plan(self, attn: nn.Module) -> Plan:
        return super().attn_plan(attn) | {"g_norm": self.split_norm()}


@register_plan("hgrn2", mixer="fla.layers.hgrn2.HGRN2Attention")
class HGRN2Plan(HGRNPlan):
    """Split by heads. The norm over the full width is fused with `o_proj`."""

    may_gather = True
    head_names = ("num_heads",)
    by_head = ("q_proj", "f_proj", "i_proj", "q_conv1d", "f_conv1d", "i_conv1d")

    def local_functions(self, attn: nn.Module):
        return {"rms_norm_linear": self.full_width_norm}
