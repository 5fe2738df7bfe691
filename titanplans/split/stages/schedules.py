"""Schedules of pipeline parallelism: which stages a rank has, and in which order it computes. Nothing runs here.

    orders("1F1B", ranks=2, stages=2, microbatches=4)[1]    # F0 B0 F1 B1 F2 B2 F3 B3 of stage 1

The orders are torch's own (`torch.distributed.pipelining`).
"""

import math
import sys
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

from titanplans.errors import ParallelError, either, near_multiples
from titanplans.text import counted, show
from titanplans.torch_private.pipelining import rank_orders

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
"""A backward computes all gradients at once, or first the gradient of the stage's input, and later those of its weights."""


class Action(NamedTuple):
    """One computation of a stage for one micro batch."""

    stage: int
    kind: Kind
    microbatch: int


Order = tuple[Action, ...]
"""The computations of a rank, in order."""


class Schedule(NamedTuple):
    """The properties of a schedule of torch."""

    stages_per_rank: range
    """How many stages a rank may have."""
    placement: Literal["loop", "v"] = "loop"
    """Rank r of n has the stages r, n + r, ... (loop), or r and 2n - 1 - r (v)."""
    splits_backward: bool = False
    """A backward is split in two, and the gradients of weights fill idle steps."""


ONE, TWO, TWO_OR_MORE = range(1, 2), range(2, 3), range(2, sys.maxsize)
SCHEDULES = {
    "GPipe": Schedule(ONE),
    "1F1B": Schedule(ONE),
    "LoopedBFS": Schedule(TWO_OR_MORE),
    "Interleaved1F1B": Schedule(TWO_OR_MORE),
    "InterleavedZeroBubble": Schedule(TWO_OR_MORE, splits_backward=True),
    "ZBVZeroBubble": Schedule(TWO, "v", splits_backward=True),
    "DualPipeV": Schedule(TWO, "v", splits_backward=True),
}
"""The schedules by torch's names."""


def schedule_of(name: str) -> Schedule:
    """Return the schedule called `name`.

    Raises:
        ParallelError: there is no such schedule.
    """
    if name not in SCHEDULES:
        raise ParallelError(f"schedule = {show(name)}: no such schedule; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def stage_count(schedule: str, ranks: int, blocks: int, layers_per_stage: int | None = None) -> int:
    """Return the number of stages for `blocks` blocks; without `layers_per_stage`, the fewest that the schedule takes.

    Raises:
        ParallelError: there is no such schedule.
    """
    least = schedule_of(schedule).stages_per_rank[0] * ranks
    return least if layers_per_stage is None else math.ceil(blocks / layers_per_stage)


def stages_of_ranks(schedule: str, ranks: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank.

    Raises:
        ParallelError: there is no such schedule, or it does not take that many stages.
    """
    properties = schedule_of(schedule)
    if stages % ranks or not stages:
        raise ParallelError(
            f"{counted(stages, 'stage')} over {counted(ranks, 'rank')}: each rank has the same number of stages; "
            f"{near_multiples(stages, ranks)} stages would work"
        )
    if (each := stages // ranks) not in properties.stages_per_rank:
        least = properties.stages_per_rank[0]
        more = " or more" if properties.stages_per_rank == TWO_OR_MORE else ""
        others = [name for name, other in SCHEDULES.items() if each in other.stages_per_rank]
        raise ParallelError(
            f"{schedule} with {counted(each, 'stage')} per rank: it takes {least}{more}; make "
            f"{counted(least * ranks, 'stage')} for {counted(ranks, 'rank')}, or choose {either(others)}"
        )
    if properties.placement == "v":
        return tuple((rank, stages - 1 - rank) for rank in range(ranks))
    return tuple(tuple(range(rank, stages, ranks)) for rank in range(ranks))


def check_schedule(schedule: str, ranks: int, stages: int, microbatches: int) -> None:
    """Refuse numbers of stages and micro batches that the schedule can't run.

    Raises:
        ParallelError: there is no such schedule, or it does not take that many stages or micro batches.
    """
    stages_of_ranks(schedule, ranks, stages)
    label = f"{schedule} with {microbatches} micro {'batch' if microbatches == 1 else 'batches'}"
    least, scope, instead = {
        "1F1B": (ranks, "for each rank", ", or choose GPipe"),
        "DualPipeV": (stages, "for each stage", ", or choose ZBVZeroBubble"),
    }.get(schedule, (1, "at least", ""))
    if microbatches < least:
        raise ParallelError(f"{label}: it needs one {scope}; {least} or more would work{instead}")
    rounds = max(1, microbatches // ranks)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % rounds:
        raise ParallelError(
            f"{label} over {counted(ranks, 'rank')}: it runs them in {rounds} equal rounds; "
            f"{near_multiples(microbatches, ranks)} would work"
        )


@cache
def orders(schedule: str, ranks: int, stages: int, microbatches: int) -> tuple[Order, ...]:
    """Return the computations of each rank, in torch's order; two that DualPipeV overlaps are listed one after the other.

    Raises:
        ParallelError: as in `check_schedule`.
    """
    check_schedule(schedule, ranks, stages, microbatches)
    rank_actions = rank_orders(schedule, ranks, stages, microbatches)
    return tuple(tuple(Action(*action) for action in order) for order in rank_actions)


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """Return the actions that `action` waits for.

    Among these, the gradient of a stage's input is a "backward_input", also if a full "backward" computes it (`completed`).
    """
    stage, kind, microbatch = action
    if kind == "backward_weight":
        return (Action(stage, "backward_input", microbatch),)
    if kind == "forward":
        return (Action(stage - 1, "forward", microbatch),) if stage else ()
    after = (Action(stage + 1, "backward_input", microbatch),) if stage + 1 < stages else ()
    return (Action(stage, "forward", microbatch), *after)


def completed(action: Action) -> Action:
    """Return the action that others wait for once `action` is done: a full backward includes the "backward_input"."""
    return action._replace(kind="backward_input") if action.kind == "backward" else action


def merge_orders(orders: Sequence[Order]) -> tuple[Action, ...]:
    """Merge the ranks' orders into one, which keeps the order of each rank and has each action after those that it needs.

    Raises:
        ParallelError: ranks wait for each other.
    """
    waiting = [deque(order) for order in orders]
    stages = 1 + max(action.stage for actions in waiting for action in actions)
    done: set[Action] = set()
    merged: list[Action] = []
    while any(waiting):
        before = len(merged)
        for actions in waiting:
            if actions and done.issuperset(needs(actions[0], stages)):
                merged.append(actions.popleft())
                done.add(completed(merged[-1]))
        if len(merged) == before:
            action = next(actions[0] for actions in waiting if actions)
            raise ParallelError(
                f"these orders never end: the {action.kind} of micro batch {action.microbatch} in stage {action.stage} "
                "waits for an action that comes after it; use the orders of a schedule"
            )
    return tuple(merged)
