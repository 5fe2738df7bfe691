"""How the two parameters of a low-rank adapter lie on the ranks: it follows from the layout of the base weight alone.

    base weight                             lora_A                          lora_B
    split by outputs                        whole, gradient Partial         split as the weight's outputs
    rows of sections, or of shared heads    whole, gradient Partial         whole, read as those rows, gradient Partial
    split by inputs                         split as the weight's inputs    whole, gradient Partial
    whole                                   whole, gradient the weight's    whole, gradient the weight's

Split by inputs, each rank adds its partial product to the output that the base's style sums. How an adapter computes is in
`titanplans.adapters.low_rank`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.split.layout import Layout

FACTORS = ("lora_A", "lora_B")
"""The parameters of an adapter, by their names in the module of the weight: peft's."""

ADAPTERS = (
    "adapters of peft work with data parallelism alone, tensor_parallel_degree = 1; those of titanplans.add_adapters(model, "
    "LoRA(rank=8)), [lora] in a job, on any plan"
)
"""What works in place of adapters of peft; a part of errors."""


class LowRank(NamedTuple):
    """The numbers of an adapter."""

    rank: int
    scaling: float
    """By which the product of the factors is multiplied: alpha / rank."""


def low_rank_of(module: nn.Module) -> LowRank | None:
    """Return the numbers of the adapter of `module`; None if it has none of ours."""
    return module.__dict__.get("_low_rank")


def is_adapted(module: nn.Module) -> bool:
    """Whether `module` has an adapter of ours."""
    return low_rank_of(module) is not None


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is an adapter's of ours; peft's own have the adapter's name behind it."""
    return name.rpartition(".")[2] in FACTORS


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [inputs, outputs], as that of GPT-2's Conv1D, and not [outputs, inputs]."""
    return not isinstance(module, nn.Linear)


def with_factors(module: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return `layouts` of the parameters of `module` with those of its adapter, where the weight has one."""
    base = "weight" if "weight" in layouts else "nf4_codes"
    if not is_adapted(module) or base not in layouts:
        return dict(layouts)
    own = {name: layout for name, layout in layouts.items() if name not in FACTORS}
    weight = layouts[base]
    by_inputs = weight.rows is None and weight.placement == Shard(0 if is_transposed(module) else 1)
    by_outputs = weight.rows is None and weight.placement == Shard(1 if is_transposed(module) else 0)
    whole = Layout(Replicate(), weight.gradient if weight.placement == Replicate() else Partial())
    if by_inputs:
        return own | {"lora_A": Layout(Shard(1), Shard(1)), "lora_B": whole}
    if by_outputs:
        return own | {"lora_A": whole, "lora_B": Layout(Shard(0), Shard(0))}
    rows = weight.rows and weight.rows._replace(dim=0)
    return own | {"lora_A": whole, "lora_B": whole._replace(rows=rows, divided_by=weight.divided_by)}


def dropout_refusal(module: nn.Module, layouts: Mapping[str, Layout]) -> str | None:
    """Return why the dropout of an adapter would not be that of the whole model; None if it is, or there is none.

    A replicated module whose gradient is Partial sees a part of the work, and its layout does not say which.
    """
    if "lora_dropout" not in module._modules or "lora_A" not in layouts:
        return None
    a, b = layouts["lora_A"], layouts["lora_B"]
    if a.gradient != Partial() or b.rows is not None or b.placement != Replicate():
        return None
    return (
        "it is replicated, and its adapter, which has a dropout, sees this rank's part of the work and can't draw the "
        "numbers of the whole: set lora.dropout to 0, or leave the module out by lora.exclude_modules"
    )
