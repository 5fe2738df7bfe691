"""The base plan of mixture-of-experts models: experts under tensor or expert parallelism, and a replicated router.

Every rank sees all tokens of its TP group, and all ranks route them equally. Under tensor parallelism a rank holds a shard
of each expert's width, and only the sum of the outputs is communicated. Under expert parallelism it holds complete
experts, and an all-to-all sends tokens to them.
"""

import sys
from typing import Any

from torch import nn

from titanplans import Plan

from .llama import LlamaPlan

_BALANCE_LOSS = "load_balancing_loss_func"
"""The function of transformers that computes the load-balancing loss (`output_router_logits`), if a model has one."""


class ExpertsPlan(LlamaPlan):
    """A Llama with mixtures of experts in place of some MLPs.

    A mixture's `experts` are 3-D weights, with gate and up packed in one, or a ModuleList of MLPs.
    """

    router: str = "gate"
    shared_mlp: str | None = None
    """The name of the MLP of shared experts, to which every token goes."""
    in_region: tuple[str, ...] = ()
    """The names of other modules and parameters of a mixture, which are replicated."""

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        experts = getattr(mlp, "experts", None)
        if experts is None:
            return super().mlp_plan(mlp)
        if self.options.degrees.ep > 1:
            return self._by_expert(mlp)
        names = (
            [f"experts.{n}" for n, _ in experts.named_children()]
            if isinstance(experts, nn.ModuleList)
            else []
        )
        plan = self.mlp_region("hidden_states", float8_input=False) | ({} if names else self.stacked(experts))
        for name in names:
            plan |= self._by_width(name)
        return plan | self._for_all_tokens(mlp)

    def _by_expert(self, mlp: nn.Module) -> Plan:
        """Plan a mixture under expert parallelism."""
        region = self.mlp_region("hidden_states", float8_input=False)
        return region | {"experts": self.by_expert()} | self._for_all_tokens(mlp)

    def _for_all_tokens(self, mlp: nn.Module) -> Plan:
        """Plan the router and the shared experts, to which every token goes."""
        shared = {} if self.shared_mlp is None else self._by_width(self.shared_mlp)
        routers = self.each_of(mlp, self.router, self.replicated_in_region())
        return shared | routers | dict.fromkeys(self.in_region, self.replicated_in_region())

    def _by_width(self, mlp_name: str) -> Plan:
        plan: Plan = {f"{mlp_name}.{name}": self.colwise() for name in self.mlp_in}
        return plan | {f"{mlp_name}.{self.mlp_out}": self.rowwise(reduce_output=False)}

    def stacked(self, experts: Any) -> Plan:
        """Plan weights [experts, 2 width, hidden] and [experts, hidden, width], or transposed; biases are optional."""
        down = experts.down_proj.shape
        width_dim = 1 if experts.gate_up_proj.shape[1] == down[2] else 2
        gate_up = (
            self.packed(down[width_dim], down[width_dim], dim=3 - width_dim)
            if getattr(experts, "is_concatenated", True)
            else self.colwise(dim=3 - width_dim, interleaved=True)
        )
        plan = {"gate_up_proj": gate_up, "down_proj": self.rowwise(reduce_output=False, dim=width_dim)}
        if getattr(experts, "has_bias", False):
            plan |= {"gate_up_proj_bias": gate_up, "down_proj_bias": self.added_to_sum()}
        return {f"experts.{name}": style for name, style in plan.items()}

    def model_functions(self, model: nn.Module):
        has_balance_loss = hasattr(sys.modules[type(model).__module__], _BALANCE_LOSS)
        return {_BALANCE_LOSS: self.count_once} if has_balance_loss else {}
