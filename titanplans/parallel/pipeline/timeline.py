"""Timelines of a pipeline: when each computation starts and ends, and the fraction of time in which ranks are idle.

timeline(orders("1F1B", ranks=4, stages=4, microbatches=8)).idle_fraction    # 3 / 11
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from titanplans.split.stages.schedules import Action, Kind, Order, completed, merge_orders, needs

UNITS: dict[Kind, float] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
"""Durations relative to a forward, by the FLOPs of matrix products."""


class Span(NamedTuple):
    """A computation, with its start and its end."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """The computations of each rank, in order; computed by `timeline`, or measured."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        """The start of the first computation of all ranks."""
        return min(spans[0].start for spans in self.ranks)

    @property
    def duration(self) -> float:
        """The time from the first start to the last end of all ranks."""
        return max(spans[-1].end for spans in self.ranks) - self.start

    @property
    def idle_fraction(self) -> float:
        """The fraction of the ranks' time in which they compute nothing: the bubble."""
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1 - busy / (len(self.ranks) * self.duration)


def timeline(
    orders: Sequence[Order], duration: Callable[[Kind, int], float] = lambda kind, _: UNITS[kind]
) -> Timeline:
    """Return the timeline of `orders` if each computation starts as soon as its rank is free and its inputs are computed.

    Sending takes no time.

    Args:
        orders: the order of computations on each rank.
        duration: returns the duration of a kind of computation in a stage, by its index; default: `UNITS`.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    spans: list[list[Span]] = [[] for _ in orders]
    ends: dict[Action, float] = {}
    for action in merge_orders(orders):
        rank_spans = spans[rank_of[action.stage]]
        start = max([ends[need] for need in needs(action, len(rank_of))], default=0.0)
        start = max(start, rank_spans[-1].end if rank_spans else 0.0)
        rank_spans.append(Span(action, start, start + duration(action.kind, action.stage)))
        ends[completed(action)] = rank_spans[-1].end
    return Timeline(tuple(map(tuple, spans)))
