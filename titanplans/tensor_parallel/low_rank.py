"""A Linear with a low-rank adapter (LoRA, arXiv:2106.09685): two more parameters of the module, and how ranks hold them.

    y = base(x) + scaling * lora_B lora_A dropout(x)          lora_A [rank, inputs], lora_B [outputs, rank]

The base keeps its class, its forward and the names of its parameters; a hook behind its forward adds the rest. How the two
lie on the ranks follows from the layout of the base weight alone, whatever style or plan it is of:

    base weight                             lora_A                          lora_B
    split by outputs                        whole, gradient Partial         split as the weight's outputs
    rows of sections, or of shared heads    whole, gradient Partial         whole, read as those rows, gradient Partial
    split by inputs                         split as the weight's inputs    whole, gradient Partial
    whole                                   whole, gradient the weight's    whole, gradient the weight's

Split by inputs, each rank adds its part to the output that the base's style sums.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.errors import PlanError
from titanplans.tensor_parallel.layout import Layout

FACTORS = ("lora_A", "lora_B")
"""The parameters of an adapter, by their names in the module of the weight: peft's."""


class LowRank(NamedTuple):
    """What an adapter is, beside its parameters."""

    rank: int
    scaling: float
    """By which the product of the factors is multiplied: alpha / rank."""


def is_adapted(module: nn.Module) -> bool:
    """Whether `module` has an adapter of ours."""
    return "_low_rank" in module.__dict__


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is an adapter's of ours; peft's own have the adapter's name behind it."""
    return name.rpartition(".")[2] in FACTORS


def takes_adapter(module: nn.Module) -> bool:
    """Whether `module` is a Linear, or GPT-2's Conv1D, which is one with its weight transposed."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [inputs, outputs], as that of GPT-2's Conv1D, and not [outputs, inputs]."""
    return not isinstance(module, nn.Linear)


def add_factors(module: nn.Module, low_rank: LowRank, dropout: float) -> None:
    """Give `module`, a Linear or a Conv1D that is not split, an adapter whose values `draw_factor` gives."""
    weight = module._parameters["weight"]
    assert weight is not None
    outputs, inputs = reversed(weight.shape) if is_transposed(module) else weight.shape
    shapes = {"lora_A": (low_rank.rank, inputs), "lora_B": (outputs, low_rank.rank)}
    for name, shape in shapes.items():
        module.register_parameter(
            name, nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
        )
    if dropout > 0:
        module.add_module("lora_dropout", LowRankDropout(dropout))
    module.__dict__["_low_rank"] = low_rank
    module.register_forward_hook(_add, with_kwargs=True)


def draw_factor(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return the initial values of a factor, as peft's: lora_A uniform in 1/sqrt(inputs), lora_B zeros; float32, on the CPU.

    Args:
        name: its full name, from which and from `seed` its values follow, so that they are those of any layout.
        shape: of the whole factor.
        seed: equal on all ranks.
    """
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    values = torch.empty(shape)
    return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)


def _add(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise PlanError(
            f"{type(module).__name__} returns a {type(output).__name__} and not a tensor, so it takes no adapter: leave it "
            "out by lora.exclude_modules"
        )
    x = args[0] if args else kwargs["input"]
    dropout = module._modules.get("lora_dropout")
    if dropout is not None:
        x = dropout(x)
    a, b = module.lora_A, module.lora_B
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(a.dtype)  # an adapter may be kept in more bits than the model
    update = nn.functional.linear(nn.functional.linear(x, a), b)
    return output + (update * module._low_rank.scaling).to(output.dtype)


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
    return own | {"lora_A": whole, "lora_B": whole._replace(rows=rows, addends=weight.addends)}


class LowRankDropout(nn.Module):
    """Dropout of an adapter's input, equal however the model is split.

    Every rank draws for the whole input, from the device's default generator, which is alike on all ranks, and takes its
    part: the columns, where the base is split by inputs.

    Args:
        p: the probability with which a number of the input is set to zero.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.split: tuple[int, int, int] | None = None
        """This rank's columns: the first, how many there are, and how many on all ranks together; None: all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        first, own, width = self.split or (0, x.shape[-1], x.shape[-1])
        kept = torch.rand((*x.shape[:-1], width), device=x.device) >= self.p
        return x * kept.narrow(-1, first, own) / (1 - self.p)


def draws(model: nn.Module) -> bool:
    """Whether an adapter of `model` has a dropout."""
    return any(isinstance(module, LowRankDropout) for module in model.modules())


def place_dropout(module: nn.Module, layouts: Mapping[str, Layout], rank: int, ranks: int) -> None:
    """Tell the dropout of the adapter of `module`, if it has one, which part of its input this rank has."""
    dropout: Any = module._modules.get("lora_dropout")
    if dropout is None or "lora_A" not in layouts or layouts["lora_A"].placement != Shard(1):
        return
    whole = module._parameters["lora_A"].shape[1]  # type: ignore[union-attr]
    size = -(whole // -ranks)
    dropout.split = (min(rank * size, whole), max(0, min(size, whole - rank * size)), whole)


def dropout_refusal(module: nn.Module, layouts: Mapping[str, Layout]) -> str | None:
    """Return why the dropout of an adapter would not be that of the whole model; None if it is, or there is none.

    A replicated module whose gradient is Partial sees a part of the work, and of which the layout does not say.
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
