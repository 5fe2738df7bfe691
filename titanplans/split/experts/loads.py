"""How busy experts are: how many rows each gets in training, and the biases that keep them equally busy.

A router with such a bias (DeepSeek-V3, GLM-4.5) chooses experts by its scores and the bias, which no gradient moves.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.split.experts.interfaces import COUNTED, EVERY, interface_of
from titanplans.split.parameters.shards import local_shard
from titanplans.split.state import state_of
from titanplans.torch_private.autograd import in_backward

BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
"""What transformers' routers call the bias that keeps their experts equally busy."""


class ExpertMixture(NamedTuple):
    """A mixture of experts in a model."""

    name: str
    experts: nn.Module
    bias: torch.Tensor | None
    """Of its router, [experts]; a buffer, or a parameter without a gradient."""
    number: int
    """Of experts."""


class Loads:
    """The rows that each expert of `model` gets in forwards in training, each once, recomputed or not.

    Each rank counts its own; ranks of tensor parallelism have the same rows. On any device, before the first forward.
    """

    def __init__(self, model: nn.Module):
        self.mixtures = [*mixtures(model)]
        self._counts: list[torch.Tensor | None] = [None] * len(self.mixtures)
        for at, mixture in enumerate(self.mixtures):
            mixture.experts.register_forward_pre_hook(partial(self._count, at), with_kwargs=True)

    def _count(self, at: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training or (not torch.compiler.is_compiling() and in_backward()):
            return
        given, number = [x.detach() for x in (*args, *kwargs.values())], self.mixtures[at].number
        if len(given) == EVERY:  # every row for every expert: those that are not zeros
            found = given[0].unflatten(0, (number, -1)).any(-1).sum(1).float()
        elif len(given) == COUNTED:
            found = given[1].float()
        else:
            rows = torch.ones_like(given[1].flatten(), dtype=torch.float32)
            found = rows.new_zeros(number).scatter_add(0, given[1].flatten().long(), rows)
        known = self._counts[at]
        self._counts[at] = found if known is None else known + found

    def forget(self) -> None:
        """Drop what was counted since the last call of `take`, of a forward that does not train."""
        self._counts = [None] * len(self.mixtures)
        for mixture in self.mixtures:
            if (state := state_of(mixture.experts)) is not None:
                state.dropped = None

    def take(self, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor | None:
        """Return the rows of each expert [mixtures, experts] since the last call, over all ranks; None without a forward.

        Collective over `groups`, in whose product each rank has other tokens.
        """
        counts = [count for count in self._counts if count is not None]
        self._counts = [None] * len(self.mixtures)
        if not counts:
            return None
        total = torch.stack(counts)
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    def take_dropped(self, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor | None:
        """Return how many pairs of a row and an expert were left out since the last call; None where none can be.

        Collective over `groups`, in whose product each rank sends other rows.
        """
        states = [state for mixture in self.mixtures if (state := state_of(mixture.experts)) is not None]
        if all(state.experts is None or state.experts.capacity is None for state in states):
            return None
        total = torch.stack([state.dropped for state in states if state.dropped is not None]).sum()
        for state in states:
            state.dropped = None
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    @torch.no_grad()
    def move_biases(self, loads: torch.Tensor, coefficient: float) -> None:
        """Raise the bias of experts with fewer rows than the mean by `coefficient`, and lower that of those with more.

        DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, where it is gamma = 0.001.
        """
        for mixture, load in zip(self.mixtures, loads, strict=True):
            if (bias := mixture.bias) is None:
                continue
            step = coefficient * (load.mean() - load).sign().to(bias.dtype).view(bias.shape)
            if isinstance(bias, DTensor):
                own = local_shard(step, bias.device_mesh, bias.placements, name=mixture.name)
                bias.to_local().add_(own)
            else:
                bias.add_(step)


def mixtures(model: nn.Module) -> Iterator[ExpertMixture]:
    """Yield the mixtures of experts of `model` that are called as transformers' are."""
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if not isinstance(experts, nn.Module) or interface_of(experts) is None:
            continue
        held = [*module.named_buffers(), *module.named_parameters()]
        biases = [x for key, x in held if key.endswith(BIASES) and not x.requires_grad]
        number = len(next(iter(experts.parameters(recurse=False))))
        yield ExpertMixture(name, experts, biases[0] if biases else None, number)
