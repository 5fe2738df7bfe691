"""`by_expert()`: each expert-parallel rank has some of the experts, each of them complete."""

import inspect

from torch import nn
from torch.distributed.tensor import Shard

from titanplans.split.experts.dispatch import ExpertRanks, install_dispatch
from titanplans.split.experts.interfaces import EVERY, interface_of
from titanplans.split.layout import Layout
from titanplans.styles.base import SplitOver, Style, direct_parameters


class ByExpert(Style):
    """Give each expert-parallel rank some of the experts; tokens are sent to the ranks of their experts and back.

        forward   all-to-all of tokens to the ranks of their experts, the experts, all-to-all back
        backward  the same two all-to-alls in reverse order; each expert's gradient is computed on its rank

    The module has parameters [experts, ...] and an attribute `num_experts`, which becomes the number of local experts. Its
    forward has one of three signatures (`split.experts.interfaces`). It takes hidden states [N, H], expert ids [N, k] and
    weights [N, k]; or tokens sorted by expert, and the number of tokens per expert; or every token once for each expert,
    which is allowed only if no expert has a bias.
    """

    is_inside_region = splits_weights = splits_by_experts = True

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return Layout(Shard(0), Shard(0))

    def refusal(self, module: nn.Module, over: SplitOver) -> str | None:
        interface = interface_of(module)
        if interface is None:
            names = list(inspect.signature(module.forward).parameters)
            reason = f"its forward takes {', '.join(names) or 'nothing'}, instead of hidden states, expert ids and weights"
            if all(param.ndim != 3 for param in module.parameters(recurse=False)):
                reason = "it has no parameter [num_experts, ...] of three dimensions"
            if not hasattr(module, "num_experts"):
                reason = "it has no attribute num_experts, which its class has to set"
            return f"{reason}: leave expert_parallel_degree at 1, which splits each expert's width"
        if interface == EVERY and (
            biases := [name for name, param in direct_parameters(module).items() if param.ndim < 3]
        ):
            return (
                f"it takes every token for every expert and has {', '.join(biases)}: an expert with a bias also changes "
                "tokens that are not routed to it; leave expert_parallel_degree at 1, which splits each expert's width"
            )
        counts = {param.shape[0] for param in direct_parameters(module).values()}
        if counts != {getattr(module, "num_experts", None)}:
            return (
                f"the first dimension of its parameters is {', '.join(map(str, sorted(counts)))}, but num_experts is "
                f"{getattr(module, 'num_experts', 'missing')}: expert parallelism needs parameters [num_experts, ...]"
            )
        return None

    def by_experts(self, module: nn.Module, ranks: ExpertRanks) -> None:
        install_dispatch(module, ranks)
