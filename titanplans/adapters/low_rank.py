"""A Linear with a low-rank adapter (LoRA, arXiv:2106.09685), and the adapter's dropout. Start at `add_factors`.

    y = base(x) + scaling * lora_B lora_A dropout(x)          lora_A [rank, inputs], lora_B [outputs, rank]

The base Linear keeps its class, its forward and the names of its parameters, and a forward hook adds the update. The
placements of both factors are in `titanplans.split.adapted`.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from titanplans.errors import PlanError
from titanplans.split.adapted import LowRank, is_adapted, is_transposed
from titanplans.split.border import Border
from titanplans.split.layout import Layout
from titanplans.text import class_name


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def takes_adapter(module: nn.Module) -> bool:
    """Whether `module` is a Linear, or GPT-2's Conv1D, a Linear with a transposed weight."""
    return isinstance(module, nn.Linear) or (class_name(module) == "Conv1D" and hasattr(module, "nf"))


def add_factors(module: nn.Module, low_rank: LowRank, dropout: float) -> None:
    """Add an adapter to `module`, an unsplit Linear or Conv1D, without initial values (see `draw_factor`)."""
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
    module.register_forward_hook(_add_update, with_kwargs=True)


def draw_factor(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return the initial values of a factor as in peft: lora_A uniform within 1/sqrt(inputs), lora_B zeros; float32, CPU.

    Args:
        name: the fully qualified name. The values depend only on `name` and `seed`, so they are the same with any
            parallelism.
        shape: the shape of the full factor.
        seed: the same on all ranks.
    """
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    values = torch.empty(shape)
    return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)


def _add_update(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise PlanError(
            f"{class_name(module)} returns a {type(output).__name__} and not a tensor, so it takes no adapter: exclude "
            "it with lora.exclude_modules"
        )
    x = args[0] if args else kwargs["input"]
    dropout = module._modules.get("lora_dropout")
    if dropout is not None:
        x = dropout(x)
    a, b = module.lora_A, module.lora_B
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(a.dtype)  # an adapter may have more bits than the model
    update = nn.functional.linear(nn.functional.linear(x, a), b)
    return output + (update * module._low_rank.scaling).to(output.dtype)


class LowRankDropout(nn.Module):
    """Dropout of an adapter's input, with the same mask as in the unsplit model.

    Every rank draws the mask of the full input from the same generator state. It then takes the slice of the mask for its
    local tokens and, if the base Linear is split by inputs, for its shard of the inputs.

    Args:
        p: the probability that an element is set to zero.
    """

    is_split_invariant = True

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.split: tuple[int, int, int] | None = None
        """This rank's shard of the inputs: (first input, inputs in the shard, all inputs). None: this rank has all
        inputs."""
        self.border: Border | None = None
        """The border of the split model; None: the model is not split."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        first, local_width, width = self.split or (0, x.shape[-1], x.shape[-1])
        shape, border = [*x.shape[:-1], width], self.border
        tokens = None if border is None or border.stream.runs_in_full else border.tokens
        if border is not None and tokens is not None and tokens.ranks > 1:
            expected = border.stream.tokens_of_cp_rank
            if expected is not None and x.shape[tokens.dim] != expected:
                raise PlanError(
                    f"the dropout of an adapter got {x.shape[tokens.dim]} tokens, but its context-parallel rank has "
                    f"{expected}, since the mixer's code has changed the sequence before this projection: set "
                    "lora.dropout to 0, or exclude the module with lora.exclude_modules"
                )
            shape[tokens.dim] *= tokens.ranks
        is_kept = torch.rand(shape, device=x.device) >= self.p
        if tokens is not None:
            is_kept = tokens.take_local(is_kept)
        return x * is_kept.narrow(-1, first, local_width) / (1 - self.p)


def draws(model: nn.Module) -> bool:
    """Whether an adapter of `model` draws random numbers, for its dropout."""
    return any(isinstance(module, LowRankDropout) for module in model.modules())


def place_dropout(module: nn.Module, layouts: Mapping[str, Layout], border: Border) -> None:
    """Set `split` and `border` of the dropout of the adapter of `module`, if it has one."""
    dropout: Any = module._modules.get("lora_dropout")
    if dropout is None:
        return
    dropout.border = border
    if "lora_A" not in layouts or layouts["lora_A"].placement != Shard(1):
        return
    width = module._parameters["lora_A"].shape[1]  # type: ignore[union-attr]
    rank, ranks = border.rank, border.group[1]
    size = -(width // -ranks)  # rounded up, so the last shards may be smaller
    dropout.split = (min(rank * size, width), max(0, min(size, width - rank * size)), width)
