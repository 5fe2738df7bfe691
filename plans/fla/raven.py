"""The plan of Raven, split by heads."""

from torch import nn

from titanplans import Plan, PlanError, register_plan

from .mixer import MixerPlan


@register_plan("raven", mixer="fla.layers.raven.Raven")
class RavenPlan(MixerPlan):
    """A router gives each token some slots of each key/value head. `g_norm` norms all heads together, `o_norm` each head."""

    may_gather = True
    by_head = ("q_proj", "o_gate_proj")
    by_shared_head = ("k_proj", "v_proj", "a_proj", "f_proj", "A_log", "dt_bias", "r_bias")
    replicated = ("q_norm", "k_norm", "o_norm", "feature_map.layer")

    def attn_plan(self, attn: nn.Module) -> Plan:
        if attn.add_gumbel_noise and self.options.degrees.tp_cp > 1:
            raise PlanError(
                "add_gumbel_noise = True: ranks that split the heads can't draw the noise that the unsplit model draws for "
                "each head; set add_gumbel_noise = False"
            )
        plan = super().attn_plan(attn)
        if not attn.use_output_gate:
            plan["g_norm"] = self.split_norm()
        if attn.router_type == "lin":
            return plan | {"r_proj": self.kv_colwise(attn)}
        return plan | {"r_proj.0": self.replicated_in_region(), "r_proj.2": self.kv_colwise(attn)}

    def local_functions(self, attn: nn.Module):
        is_fused = attn.fuse_norm and not attn.use_output_gate
        return {"rms_norm_linear": self.full_width_norm} if is_fused else {}
