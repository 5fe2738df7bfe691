"""Rows to the ranks of their experts and back: two all-to-alls a call, and one of counts.

    own rows       a rank of tensor parallelism has all rows of its group in a region, and sends its share of them
    dispatched     each pair of a row and an expert, in the order of the experts; without a capacity, all of them
    computed       by the experts' own forward, one expert a row, with weights of one
    combined       back in the order of the rows, weighted and summed; the other rows of the group are zeros, whose sum
                   the region's exit makes

How many rows come is read on the host: torch's all-to-all takes numbers. Every rank takes part in each exchange of the
backward, also one to which no row came.
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

Rows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""What experts make of hidden states [N, H], the numbers of their experts [N, 1] and weights of one."""


class ExpertRanks(NamedTuple):
    """The ranks that share experts, and those among them that have the same rows."""

    group: Group
    tp: int
    """So many ranks have the same rows: those of tensor parallelism."""
    tp_rank: int
    """This rank's number among those."""
    capacity: float | None = None
    """An expert takes at most so many times the mean of the pairs that a rank sends; None: all."""


def install_dispatch(module: nn.Module, ranks: ExpertRanks) -> None:
    """Let `module`, which holds this rank's experts, be called with rows for all experts."""
    interface = interface_of(module)
    assert interface is not None  # the style refuses others
    kinds = {CHOSEN: _of_chosen_rows, COUNTED: _of_counted_rows, EVERY: _of_every_row}
    make_state(module).experts = ranks
    module.num_experts //= ranks.group[1]  # type: ignore[operator]
    specialise(module, kinds[interface](type(module)))


@cache
def _of_chosen_rows(cls: type[nn.Module]) -> type[nn.Module]:
    names = list(inspect.signature(cls.forward).parameters)[1:]

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = [*args, *(kwargs[name] for name in names[len(args) :])]
        return _through_experts(self, partial(cls.forward, self), *given)

    return subclass(cls, {"forward": forward}, "dispatch")


@cache
def _of_counted_rows(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass `cls`, which takes rows in the order of their experts, and how many each has."""

    def run(self: Any, rows: torch.Tensor, numbers: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        order = numbers[:, 0].argsort(stable=True)
        counts = nn.functional.one_hot(numbers[:, 0], self.num_experts).sum(0)
        return cls.forward(self, rows[order], counts)[order.argsort()]

    @wraps(cls.forward)
    def forward(self: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(len(counts), device=x.device).repeat_interleave(counts, output_size=len(x))
        return _through_experts(self, partial(run, self), x, numbers[:, None], torch.ones_like(x[:, :1]))

    return subclass(cls, {"forward": forward}, "dispatch")


@cache
def _of_every_row(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass `cls`, which takes every row for every expert: those that are not zeros are sent."""

    def run(self: Any, rows: torch.Tensor, numbers: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        there = nn.functional.one_hot(numbers[:, 0], self.num_experts)
        most = int(there.sum(0).max())  # waits for the device
        place = (numbers * most + there.cumsum(0).gather(1, numbers) - 1)[:, 0]
        padded = rows.new_zeros(self.num_experts * most, rows.shape[1]).index_copy(0, place, rows)
        return cls.forward(self, padded)[place]

    @wraps(cls.forward)
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        each = len(hidden_states) // (self.num_experts * self._split.experts.group[1])
        sent = hidden_states.any(1).nonzero()  # waits for the device
        rows = hidden_states[sent[:, 0]]
        made = _through_experts(self, partial(run, self), rows, sent // each, torch.ones_like(rows[:, :1]))
        return torch.zeros_like(hidden_states).index_copy(0, sent[:, 0], made)

    return subclass(cls, {"forward": forward}, "dispatch")


def _through_experts(
    module: Any, run: Rows, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return this rank's partial sum [N, H] of what the experts [N, k] make of `x` [N, H], weighted by `weights` [N, k]."""
    ranks: ExpertRanks = module._split.experts
    group, each = ranks.group, experts.shape[-1]
    shares = [len(part) for part in experts.tensor_split(ranks.tp)]
    own, experts, weights = (y.split(shares)[ranks.tp_rank] for y in (x, experts, weights))

    order = experts.flatten().argsort(stable=True)
    counts = experts.new_zeros(group[1] * module.num_experts, dtype=torch.long)
    counts = counts.scatter_add(0, experts.flatten().long(), torch.ones_like(order))
    if ranks.capacity is not None:
        order, counts = _within_capacity(module, order, counts, ranks.capacity)
    counts = counts.view(group[1], module.num_experts)
    came = all_to_all(counts, group)
    sent, received = torch.stack([counts.sum(1), came.sum(1)]).tolist()  # waits for the device

    rows = exchange_rows(own[order // each], received, sent, group)
    made = _computed(module, run, rows, came).to(
        rows.dtype
    )  # a rank without rows has what came, autocast or not
    back = exchange_rows(made, sent, received, group)
    if len(order) == experts.numel():
        pairs = back[order.argsort()]
    else:
        pairs = back.new_zeros(experts.numel(), back.shape[1]).index_copy(0, order, back)
    of_rows = pairs.unflatten(0, (-1, each)) if len(own) else pairs[:, None]
    mixed = (of_rows * weights[..., None]).sum(1).to(x.dtype)
    before = sum(shares[: ranks.tp_rank])
    return nn.functional.pad(mixed, (0, 0, before, len(x) - before - len(own)))


def _within_capacity(
    module: Any, order: torch.Tensor, counts: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave out pairs beyond an expert's capacity, those of the last rows: Switch Transformer, arXiv:2101.03961, 2.2.

    Args:
        module: counts them in training, each once, recomputed or not.
        order: pairs in the order of their experts, and of rows.
        counts: of pairs, by expert.
        factor: the capacity over the mean number of pairs of an expert.
    """
    capacity = math.ceil(factor * len(order) / len(counts))
    starts = counts.cumsum(0) - counts
    kept = (
        torch.arange(len(order), device=order.device)
        - starts.repeat_interleave(counts, output_size=len(order))
        < capacity
    )
    if module.training and not in_backward():
        dropped = (~kept).sum()
        module._split.dropped = dropped if (known := module._split.dropped) is None else known + dropped
    return order[kept], counts.clamp(max=capacity)  # waits for the device


def _computed(module: Any, run: Rows, rows: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
    """Return what this rank's experts make of `rows`; `came` [ranks, experts] are their numbers by sender and expert."""
    if not len(rows):
        # Keeps parameters in the graph (zero gradients), so that this rank joins the backward's exchanges.
        params = (getattr(module, name) for name, param in module._parameters.items() if param is not None)
        return sum((param.flatten()[:0].sum() for param in params), rows)
    numbers = torch.arange(came.shape[1], device=rows.device).repeat(len(came))
    numbers = numbers.repeat_interleave(came.flatten(), output_size=len(rows))[:, None]
    return run(rows, numbers, torch.ones_like(numbers, dtype=rows.dtype))
