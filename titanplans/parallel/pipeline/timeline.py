"""When each computation of a pipeline starts and ends, and the share of their time in which ranks are idle.

    timeline(orders("1F1B", ranks=4, stages=4, microbatches=8)).idle_share    # 3 / 11

A timeline is computed from an order, or made of measured times.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from titanplans.split.stages.schedules import Action, Kind, Order, completed, merge_orders, needs

UNITS: dict[Kind, float] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
"""Durations in those of a forward, by the FLOPs of matrix products."""


class Span(NamedTuple):
    """A computation and its time."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """The computations of each rank, in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        """When the first rank begins."""
        return min(spans[0].start for spans in self.ranks)

    @property
    def duration(self) -> float:
        """The time from the first start to the last end."""
        return max(spans[-1].end for spans in self.ranks) - self.start

    @property
    def idle_share(self) -> float:
        """The part of the ranks' time in which they compute nothing: the bubble."""
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1 - busy / (len(self.ranks) * self.duration)


def timeline(
    orders: Sequence[Order], duration: Callable[[Kind, int], float] = lambda kind, _: UNITS[kind]
) -> Timeline:
    """Return the timeline of `orders` if each computation starts once its rank is free and what it needs is there.

    Args:
        orders: of each rank.
        duration: of a kind of computation in a stage, `UNITS` where all are alike; sending takes no time.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    spans: list[list[Span]] = [[] for _ in orders]
    ends: dict[Action, float] = {}
    for action in merge_orders(orders):
        own = spans[rank_of[action.stage]]
        start = max([ends[need] for need in needs(action, len(rank_of))], default=0.0)
        start = max(start, own[-1].end if own else 0.0)
        own.append(Span(action, start, start + duration(action.kind, action.stage)))
        ends[completed(action)] = own[-1].end
    return Timeline(tuple(map(tuple, spans)))
