"""The plan of YOCO, whose second half uses keys and values that are computed once (Sun et al. 2024, arXiv:2405.05254)."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from titanplans import Plan, PlanError, register_plan

from .mixer import MixerPlan, has


@register_plan(mixer="fla.layers.yoco.YOCOGatedRetention")
class GatedRetentionPlan(MixerPlan):
    """The mixer of blocks in the first half that have neither Gated DeltaNet nor window attention."""

    may_gather = True
    by_head = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj")


@register_plan("yoco", mixer="fla.layers.yoco.YOCOCrossAttention")
class YOCOPlan(MixerPlan):
    """Blocks of the second half, and the module that computes the keys and values for these blocks."""

    by_head = ("q_proj",)
    replicated = ("q_norm",)

    def heads(self, attn: nn.Module) -> dict[str, int]:
        counts = super().heads(attn)
        # A mixer without `k_proj` uses the keys of another module, which has the number of key/value heads.
        return counts if has(attn, "k_proj") else {"num_heads": counts["num_heads"]}

    def model_plan(self, model: nn.Module) -> Plan:
        plan = super().model_plan(model)
        if has(model, "model.shared_kv_builder"):
            kv = self.kv_colwise(model.get_submodule("model.shared_kv_builder"))
            builder_plan = {
                "kv_norm": self.replicated_in_region(),
                "k_proj": kv,
                "v_proj": kv,
                **self.shared_region(float8_input=False),  # the norm uses the input, too
            }
            plan |= {
                f"model.shared_kv_builder.{name}".removesuffix("."): s for name, s in builder_plan.items()
            }
        mixing = [f"model.shared_kv_res_{name}" for name in ("proj", "norm")]
        return plan | {name: self.replicated_on_stream() for name in mixing if has(model, name)}

    def model_attributes(self, model: nn.Module) -> dict[str, int]:
        if not has(model, "model.shared_kv_builder"):
            return {}
        builder = model.get_submodule("model.shared_kv_builder")
        return {"model.shared_kv_builder.num_kv_heads": self.heads_per_rank(builder.num_kv_heads)}  # type: ignore[arg-type]

    def model_functions(self, model: nn.Module) -> Mapping[str, Callable[..., Any]]:
        replaced = {"model._select_last_query_hidden_states": refuse_last_token}
        return replaced if self.options.sequence_parallel else {}


def refuse_last_token(select: Callable[..., Any], ranks: Any) -> Callable[..., Any]:
    """Refuse options that select the last token of hidden states, which are sharded over the ranks."""

    def local(*args: Any, **kwargs: Any) -> Any:
        raise PlanError(
            "skip_cross_decoder = True selects the last token of hidden states, which are sharded over the ranks: pass "
            "skip_cross_decoder = False, also to generate(), or set sequence_parallel = False"
        )

    return local
