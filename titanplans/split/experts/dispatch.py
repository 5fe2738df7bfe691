"""Rows to the ranks of their experts and back: two all-to-alls a call, and one of counts.

    own rows       a rank of tensor parallelism has all rows of its group in a region, and sends its share of them
    dispatched     each pair of a row and an expert, in the order of the experts
    computed       by the experts' own forward, one expert a row, with weights of one
    combined       back in the order of the rows, weighted and summed; the other rows of the group are zeros, whose sum
                   the region's exit makes

How many rows come is read on the host: torch's all-to-all takes numbers. Every rank takes part in each exchange of the
backward, also one to which no row came.
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.split.collectives import Group, all_to_all, exchange_rows
from titanplans.split.state import make_state, specialise, subclass


class ExpertRanks(NamedTuple):
    """The ranks that share experts, and those among them that have the same rows."""

    group: Group
    tp: int
    """So many ranks have the same rows: those of tensor parallelism."""
    tp_rank: int
    """This rank's number among those."""


def install_dispatch(module: nn.Module, ranks: ExpertRanks) -> None:
    """Let `module`, which holds this rank's experts, be called with rows for all experts."""
    make_state(module).experts = ranks
    module.num_experts //= ranks.group[1]  # type: ignore[operator]
    specialise(module, _dispatching(type(module)))


@cache
def _dispatching(cls: type[nn.Module]) -> type[nn.Module]:
    names = list(inspect.signature(cls.forward).parameters)[1:]

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = [*args, *(kwargs[name] for name in names[len(args) :])]
        return _through_experts(self, lambda *rows: cls.forward(self, *rows), *given)

    return subclass(cls, {"forward": forward})


def _through_experts(
    module: Any,
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return this rank's summand [N, H] of what the experts [N, k] make of `x` [N, H], weighted by `weights` [N, k]."""
    ranks: ExpertRanks = module._split.experts
    group, each = ranks.group, experts.shape[-1]
    shares = [len(part) for part in experts.tensor_split(ranks.tp)]
    own, experts, weights = (y.split(shares)[ranks.tp_rank] for y in (x, experts, weights))

    order = experts.flatten().argsort(stable=True)
    counts = experts.new_zeros(group[1] * module.num_experts, dtype=torch.long)
    counts = counts.scatter_add(0, experts.flatten().long(), torch.ones_like(order))
    counts = counts.view(group[1], module.num_experts)
    came = all_to_all(counts, group)
    sent, received = torch.stack([counts.sum(1), came.sum(1)]).tolist()  # waits for the device

    rows = exchange_rows(own[order // each], received, sent, group)
    made = _computed(module, run, rows, came)
    back = exchange_rows(made, sent, received, group)
    of_rows = back[order.argsort()].unflatten(0, (-1, each)) if len(own) else back[:, None]
    mixed = (of_rows * weights[..., None]).sum(1).to(x.dtype)
    before = sum(shares[: ranks.tp_rank])
    return nn.functional.pad(mixed, (0, 0, before, len(x) - before - len(own)))


def _computed(
    module: Any, run: Callable[..., torch.Tensor], rows: torch.Tensor, came: torch.Tensor
) -> torch.Tensor:
    """Return what this rank's experts make of `rows`; `came` [ranks, experts] are their numbers by sender and expert."""
    if not len(rows):
        # Its parameters have a gradient, of zeros, and it takes part in the backward's exchanges, as the others.
        params = (getattr(module, name) for name, param in module._parameters.items() if param is not None)
        return sum((param.flatten()[:0].sum() for param in params), rows)
    numbers = torch.arange(came.shape[1], device=rows.device).repeat(len(came))
    numbers = numbers.repeat_interleave(came.flatten(), output_size=len(rows))[:, None]
    return run(rows, numbers, torch.ones_like(numbers, dtype=rows.dtype))
