"""The layouts of a low-rank adapter's two factors, which follow from the layout of the base weight alone.

    base weight            lora_A                              lora_B
    sharded by outputs     replicated, gradient Partial        sharded as the weight's outputs
    stored with `rows`     replicated, gradient Partial        replicated with the same `rows`, gradient Partial
    sharded by inputs      sharded as the weight's inputs      replicated, gradient Partial
    replicated             replicated, gradient the weight's   replicated, gradient the weight's

If the weight is sharded by inputs, each rank adds the adapter's partial product to the base weight's partial product,
and the base module's style sums them over the ranks. The adapter's computation is in `titanplans.adapters.low_rank`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.split.layout import Layout

FACTORS = ("lora_A", "lora_B")
"""The names of an adapter's parameters in the module of the base weight, as peft names them."""

ADAPTERS = (
    "peft's adapters work only with data parallelism (tensor_parallel_degree = 1); titanplans.add_adapters(model, "
    "LoRA(rank=8)), or [lora] in a job, works with any plan"
)
"""The end of error messages about peft's adapters: what works instead."""


class LowRank(NamedTuple):
    """The rank and the scaling of an adapter."""

    rank: int
    scaling: float
    """Multiplies the product of the factors: alpha / rank."""


def low_rank_of(module: nn.Module) -> LowRank | None:
    """Return the rank and scaling of the adapter of `module`; None if it has no adapter of titanplans."""
    return module.__dict__.get("_low_rank")


def is_adapted(module: nn.Module) -> bool:
    """Whether `module` has an adapter of titanplans."""
    return low_rank_of(module) is not None


def is_factor(name: str) -> bool:
    """Whether `name` is a parameter of a titanplans adapter; False for peft's own adapters, whose names end
    differently."""
    return name.rpartition(".")[2] in FACTORS


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [inputs, outputs], as in GPT-2's Conv1D, instead of [outputs, inputs]."""
    return not isinstance(module, nn.Linear)


def with_factors(module: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return `layouts`, extended by the layouts of the adapter's two factors if `module` has an adapter."""
    base = "weight" if "weight" in layouts else "nf4_codes"
    if not is_adapted(module) or base not in layouts:
        return dict(layouts)
    others = {name: layout for name, layout in layouts.items() if name not in FACTORS}
    weight = layouts[base]
    by_inputs = weight.rows is None and weight.placement == Shard(0 if is_transposed(module) else 1)
    by_outputs = weight.rows is None and weight.placement == Shard(1 if is_transposed(module) else 0)
    replicated = Layout(Replicate(), weight.gradient if weight.placement == Replicate() else Partial())
    if by_inputs:
        return others | {"lora_A": Layout(Shard(1), Shard(1)), "lora_B": replicated}
    if by_outputs:
        return others | {"lora_A": replicated, "lora_B": Layout(Shard(0), Shard(0))}
    rows = weight.rows and weight.rows._replace(dim=0)
    lora_b = replicated._replace(rows=rows, divided_by=weight.divided_by)
    return others | {"lora_A": replicated, "lora_B": lora_b}


def dropout_refusal(module: nn.Module, layouts: Mapping[str, Layout]) -> str | None:
    """Return why an adapter's dropout would differ from its dropout in the unsplit model; None if it would not.

    A replicated module with a Partial gradient processes only some tokens or heads, and its layout does not say which.
    """
    if "lora_dropout" not in module._modules or "lora_A" not in layouts:
        return None
    a, b = layouts["lora_A"], layouts["lora_B"]
    if a.gradient != Partial() or b.rows is not None or b.placement != Replicate():
        return None
    return (
        "it is replicated, and its adapter has a dropout, which sees only this rank's tokens or heads and can't draw "
        "the random numbers of the unsplit model: set lora.dropout to 0, or exclude the module with "
        "lora.exclude_modules"
    )
