"""The load of experts: how many tokens each gets in training, and the biases that balance them. Start at `Loads`."""

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

# A router with a load-balancing bias (DeepSeek-V3, GLM-4.5) chooses experts by scores plus bias; the bias gets no gradient.
BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
"""The names of a router's load-balancing bias in transformers and torchtitan."""


class ExpertMixture(NamedTuple):
    """A mixture of experts in a model."""

    name: str
    experts: nn.Module
    bias: torch.Tensor | None
    """The router's load-balancing bias, [experts]: a buffer, or a parameter without a gradient."""
    num_experts: int


class Loads:
    """Counts the tokens that each expert of `model` gets in training forwards; recomputed forwards are not counted.

    Each rank counts its own tokens; tensor-parallel ranks have the same tokens. The model may be on any device. Create a
    `Loads` before the first forward.
    """

    def __init__(self, model: nn.Module):
        self.mixtures = [*find_mixtures(model)]
        self._counts: list[torch.Tensor | None] = [None] * len(self.mixtures)
        for index, mixture in enumerate(self.mixtures):
            mixture.experts.register_forward_pre_hook(partial(self._count, index), with_kwargs=True)

    def _count(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training or (not torch.compiler.is_compiling() and in_backward()):
            return
        arguments = [x.detach() for x in (*args, *kwargs.values())]
        num_experts = self.mixtures[index].num_experts
        if len(arguments) == EVERY:  # tokens that are not routed to an expert are zeros
            counts = arguments[0].unflatten(0, (num_experts, -1)).any(-1).sum(1).float()
        elif len(arguments) == COUNTED:
            counts = arguments[1].float()
        else:
            ids = arguments[1].flatten().long()
            ones = torch.ones_like(ids, dtype=torch.float32)
            counts = ones.new_zeros(num_experts).scatter_add(0, ids, ones)
        total = self._counts[index]
        self._counts[index] = counts if total is None else total + counts

    def discard(self) -> None:
        """Discard the counts since the last call of `take`, for a forward that does not train."""
        self._counts = [None] * len(self.mixtures)
        for mixture in self.mixtures:
            if (state := state_of(mixture.experts)) is not None:
                state.dropped = None

    def take(self, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor | None:
        """Return the token counts [mixtures, experts] since the last call, summed over all ranks; None if no forward
        ran.

        Collective over `groups`, which together cover all ranks with different tokens.
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
        """Return how many pairs of token and expert were dropped since the last call; None if experts have no capacity.

        Collective over `groups`, which together cover all ranks that send different tokens.
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
        """Raise biases of experts with fewer tokens than the mean by `coefficient`, and lower biases of experts with more.

        This is the update of DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, whose coefficient is gamma = 0.001.
        """
        for mixture, load in zip(self.mixtures, loads, strict=True):
            if (bias := mixture.bias) is None:
                continue
            step = coefficient * (load.mean() - load).sign().to(bias.dtype).view(bias.shape)
            if isinstance(bias, DTensor):
                local_step = local_shard(step, bias.device_mesh, bias.placements, name=mixture.name)
                bias.to_local().add_(local_step)
            else:
                bias.add_(step)


def find_mixtures(model: nn.Module) -> Iterator[ExpertMixture]:
    """Yield the mixtures of experts of `model` whose experts have one of the known signatures (`interface_of`)."""
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if not isinstance(experts, nn.Module) or interface_of(experts) is None:
            continue
        named = [*module.named_buffers(), *module.named_parameters()]
        biases = [x for key, x in named if key.endswith(BIASES) and not x.requires_grad]
        num_experts = len(next(iter(experts.parameters(recurse=False))))
        yield ExpertMixture(name, experts, biases[0] if biases else None, num_experts)
