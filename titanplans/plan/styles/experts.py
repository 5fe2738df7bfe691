"""The style of experts that ranks share by number: each holds some of them whole."""

import inspect

from torch import nn
from torch.distributed.tensor import Shard

from titanplans.plan.layout import Layout
from titanplans.plan.styles.base import Style, held

CHOSEN = 3
"""transformers' experts are called with hidden states [N, H], the numbers of their experts [N, k] and weights [N, k]."""
COUNTED = 2
"""torchtitan's, with rows [N, H] in the order of their experts, and how many of them each expert has [experts]."""
EVERY = 1
"""Llama 4's, with every row for every expert [experts * N, H], expert by expert: zeros where it was not chosen."""


def interface_of(module: nn.Module) -> int | None:
    """Return `CHOSEN`, `COUNTED` or `EVERY`, as `module` is called; None if it holds no experts that are called so."""
    cls = getattr(type(module), "whole_class", type(module))  # of a split module that before the split
    taken = len(inspect.signature(cls.forward).parameters) - 1
    holds = hasattr(module, "num_experts") and any(
        param.ndim == 3 for param in module.parameters(recurse=False)
    )
    return taken if holds and taken in (CHOSEN, COUNTED, EVERY) else None


class ByExpert(Style):
    """Give each rank of expert parallelism some of the experts, whole; rows are sent to their experts' ranks and back.

    For a module that holds experts in parameters [experts, ...], and whose forward takes hidden states [N, H], the experts
    of each [N, k] and their weights [N, k]; or rows in the order of their experts, and how many each has; or every row for
    every expert, and has no biases. It reads the number of experts as `num_experts`, which becomes the rank's.
    """

    inside = splits = True

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Shard(0), Shard(0))

    def refusal(self, module: nn.Module) -> str | None:
        interface = interface_of(module)
        if interface is None:
            taken = list(inspect.signature(module.forward).parameters)
            why = f"its forward takes {', '.join(taken) or 'nothing'}, and not hidden states, experts' ids and weights"
            if all(param.ndim != 3 for param in module.parameters(recurse=False)):
                why = "it has no parameter [num_experts, ...] of three dimensions"
            if not hasattr(module, "num_experts"):
                why = "it has no num_experts, the number of its experts, which its class has to set"
            return f"{why}: leave expert_parallel_degree at 1, which splits each expert's width"
        if interface == EVERY and (flat := [name for name, param in held(module).items() if param.ndim < 3]):
            return (
                f"it takes every row for every expert, and has {', '.join(flat)}: an expert with a bias makes something of "
                "rows that were not sent to it; leave expert_parallel_degree at 1, which splits each expert's width"
            )
        numbers = {param.shape[0] for param in held(module).values()}
        if numbers != {getattr(module, "num_experts", None)}:
            return (
                f"its parameters count {', '.join(map(str, sorted(numbers)))} in their first dimension and num_experts is "
                f"{getattr(module, 'num_experts', 'missing')}: expert parallelism needs parameters [num_experts, ...]"
            )
        return None
