"""Send tokens to the ranks of their experts and back: `install_dispatch`. A call has three all-to-alls, one of counts.

1. local     a rank of tensor parallelism has all tokens of its TP group in a region, and sends 1 / tp of them
2. dispatch  each pair of a token and an expert is sent, sorted by expert; with a capacity, not all pairs
3. compute   the experts' own forward runs, with one expert per token, and weights of 1
4. combine   outputs are sent back, put into token order, weighted and summed; this rank's result is 0 for tokens that other
             TP ranks have sent, and the region's exit sums the results of the TP ranks
"""

import inspect
import math
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.split.collectives import Group, all_to_all, exchange_rows
from titanplans.split.experts.interfaces import CHOSEN, COUNTED, EVERY, interface_of
from titanplans.split.state import make_state, specialise, subclass
from titanplans.torch_private.autograd import in_backward
from titanplans.torch_private.dispatch import FakeTensor

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The forward of local experts. It takes hidden states [N, H], the ids of their experts [N, 1] and weights [N, 1], all 1."""


class ExpertRanks(NamedTuple):
    """The ranks that experts are distributed over, and how many of them have the same tokens."""

    group: Group
    tp: int
    """Number of neighbouring ranks that have the same tokens: the tensor-parallel ranks."""
    tp_rank: int
    """This rank's index among the tensor-parallel ranks."""
    capacity: float | None = None
    """An expert takes from each rank at most this factor times the rank's mean number of tokens per expert. None: no
    limit."""


def install_dispatch(module: nn.Module, ranks: ExpertRanks) -> None:
    """Let `module`, which holds this rank's experts, be called with tokens for all experts."""
    interface = interface_of(module)
    assert interface is not None  # the style refuses other modules
    kinds = {CHOSEN: _with_chosen_experts, COUNTED: _with_sorted_tokens, EVERY: _with_every_expert}
    make_state(module).experts = ranks
    module.num_experts //= ranks.group[1]  # type: ignore[operator]
    specialise(module, kinds[interface](type(module)))


@cache
def _with_chosen_experts(cls: type[nn.Module]) -> type[nn.Module]:
    names = list(inspect.signature(cls.forward).parameters)[1:]

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = [*args, *(kwargs[name] for name in names[len(args) :])]
        return _through_experts(self, partial(cls.forward, self), *arguments)

    return subclass(cls, {"forward": forward}, "dispatch")


@cache
def _with_sorted_tokens(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass `cls`, whose forward takes tokens sorted by expert, and the number of tokens of each expert."""

    def run(self: Any, tokens: torch.Tensor, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        order = ids[:, 0].argsort(stable=True)
        counts = nn.functional.one_hot(ids[:, 0], self.num_experts).sum(0)
        return cls.forward(self, tokens[order], counts)[order.argsort()]

    @wraps(cls.forward)
    def forward(self: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(len(counts), device=x.device).repeat_interleave(counts, output_size=len(x))
        return _through_experts(self, partial(run, self), x, ids[:, None], torch.ones_like(x[:, :1]))

    return subclass(cls, {"forward": forward}, "dispatch")


@cache
def _with_every_expert(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass `cls`, whose forward takes every token for every expert.

    Tokens that are not routed to an expert are zeros there, and are not sent.
    """

    def run(self: Any, tokens: torch.Tensor, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        one_hot = nn.functional.one_hot(ids[:, 0], self.num_experts)
        length = int(one_hot.sum(0).max())  # waits for the device
        position = (ids * length + one_hot.cumsum(0).gather(1, ids) - 1)[:, 0]
        padded = tokens.new_zeros(self.num_experts * length, tokens.shape[1]).index_copy(0, position, tokens)
        return cls.forward(self, padded)[position]

    @wraps(cls.forward)
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        token_count = len(hidden_states) // (self.num_experts * self._split.experts.group[1])
        indices = hidden_states.any(1).nonzero()  # waits for the device
        tokens = hidden_states[indices[:, 0]]
        weights = torch.ones_like(tokens[:, :1])
        output = _through_experts(self, partial(run, self), tokens, indices // token_count, weights)
        return torch.zeros_like(hidden_states).index_copy(0, indices[:, 0], output)

    return subclass(cls, {"forward": forward}, "dispatch")


def _through_experts(
    module: Any, run: Experts, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Apply `experts` [N, k] to `x` [N, H], weighted by `weights` [N, k]: return this rank's partial sum [N, H]."""
    ranks: ExpertRanks = module._split.experts
    group, k = ranks.group, experts.shape[-1]
    sizes = [len(chunk) for chunk in experts.tensor_split(ranks.tp)]
    local, experts, weights = (y.split(sizes)[ranks.tp_rank] for y in (x, experts, weights))

    order = experts.flatten().argsort(stable=True)
    counts = experts.new_zeros(group[1] * module.num_experts, dtype=torch.long)
    counts = counts.scatter_add(0, experts.flatten().long(), torch.ones_like(order))
    if ranks.capacity is not None:
        order, counts = _within_capacity(module, order, counts, ranks.capacity)
    counts = counts.view(group[1], module.num_experts)
    received_counts = all_to_all(counts, group)
    if isinstance(counts, FakeTensor):  # it has no values: assume that the router distributes tokens evenly
        sent = received = [len(chunk) for chunk in order.tensor_split(group[1])]
    else:
        # torch's all-to-all takes sizes as Python ints, so the host waits for the device.
        sent, received = torch.stack([counts.sum(1), received_counts.sum(1)]).tolist()

    tokens = exchange_rows(local[order // k], received, sent, group)
    # Under autocast a rank without tokens returns its input's dtype, so the output is cast to that on every rank.
    output = _run_local_experts(module, run, tokens, received_counts).to(tokens.dtype)
    returned = exchange_rows(output, sent, received, group)
    if len(order) == experts.numel():
        pairs = returned[order.argsort()]
    else:
        pairs = returned.new_zeros(experts.numel(), returned.shape[1]).index_copy(0, order, returned)
    by_token = pairs.unflatten(0, (-1, k)) if len(local) else pairs[:, None]
    mixed = (by_token * weights[..., None]).sum(1).to(x.dtype)
    before = sum(sizes[: ranks.tp_rank])
    return nn.functional.pad(mixed, (0, 0, before, len(x) - before - len(local)))


def _within_capacity(
    module: Any, order: torch.Tensor, counts: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop pairs beyond an expert's capacity, those of the last tokens first (Switch Transformer, arXiv:2101.03961, 2.2).

    Args:
        module: its state counts the pairs dropped in training; a recomputed forward is not counted again.
        order: pairs sorted by expert, then by token.
        counts: the number of pairs of each expert.
        factor: the capacity divided by the mean number of pairs of an expert.
    """
    capacity = math.ceil(factor * len(order) / len(counts))
    if isinstance(order, FakeTensor):  # with even routing
        return order[: capacity * len(counts)], counts
    starts = counts.cumsum(0) - counts
    is_kept = (
        torch.arange(len(order), device=order.device)
        - starts.repeat_interleave(counts, output_size=len(order))
        < capacity
    )
    if module.training and not in_backward():
        dropped = (~is_kept).sum()
        total = module._split.dropped
        module._split.dropped = dropped if total is None else total + dropped
    return order[is_kept], counts.clamp(max=capacity)  # waits for the device


def _run_local_experts(module: Any, run: Experts, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Apply this rank's experts to `tokens`; `counts` [ranks, experts] are their counts by sender and expert."""
    if not len(tokens):
        # Every rank has to join the backward's all-to-alls: this keeps the parameters in the graph, with zero gradients.
        params = (getattr(module, name) for name, param in module._parameters.items() if param is not None)
        return sum((param.flatten()[:0].sum() for param in params), tokens)
    ids = torch.arange(counts.shape[1], device=tokens.device).repeat(len(counts))
    ids = ids.repeat_interleave(counts.flatten(), output_size=len(tokens))[:, None]
    return run(tokens, ids, torch.ones_like(ids, dtype=tokens.dtype))
