"""The plan of mixture-of-memories, split by heads (Du et al. 2025, arXiv:2502.13685)."""

from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .mixer import MixerPlan, has


@register_plan("mom", mixer="fla.layers.mom.MomAttention")
class MomPlan(MixerPlan):
    """Every rank routes all tokens, and has a shard of the heads of each memory."""

    by_head = (
        *("q_proj", "q_conv1d", "k_conv1d", "v_conv1d", "g_proj", "A_log", "dt_bias"),
        *("shared_k", "shared_v", "shared_b", "shared_a"),
    )
    replicated = ("gate", "o_norm")
    counts = ("num_heads",)

    def attn_plan(self, attn: nn.Module) -> Plan:
        memories = {
            f"{name}.{index}": self.colwise()
            for name in ("k_proj", "v_proj", "b_proj", "a_proj")
            for index in range(attn.num_memories)  # type: ignore[arg-type]
            if has(attn, name)
        }
        # The mixer's code selects the tokens of each memory from the full input.
        return super().attn_plan(attn) | self.attn_region(float8_input=False, may_gather=True) | memories

    def model_functions(self, model: nn.Module) -> dict[str, Any]:
        return {"load_balancing_loss_func": self.count_once}
