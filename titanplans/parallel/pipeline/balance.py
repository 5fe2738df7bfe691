"""Split a decoder's blocks into pipeline stages: at named blocks, or so that the cost of the costliest stage is minimal.

balance([1, 1, 1, 1], first=0, last=1, stages=2)    # (0, 2): stages of two blocks, which cost 2 and 3
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from titanplans.errors import ParallelError, nearest
from titanplans.text import counted


def balance(costs: Sequence[int], first: int, last: int, stages: int) -> tuple[int, ...]:
    """Split blocks into stages of one or more consecutive blocks; return the index of each stage's first block.

    The costliest stage limits a pipeline's throughput. Of the splits in which its cost is minimal, take the most even one
    (by the sum of squares), then the one with the fewest blocks in early stages, which hold the most activations.

    Args:
        costs: the cost of each block, such as its FLOPs.
        first: the cost of the modules before the blocks (embedding), which are in the first stage.
        last: the cost of the modules after the blocks (norm, head), which are in the last stage.
        stages: the number of stages.

    Raises:
        ParallelError: there are more stages than blocks.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise ParallelError(
            f"{counted(stages, 'stage')} of {counted(blocks, 'block')}: a stage has one block or more; lower "
            "pipeline_parallel_degree, or raise pipeline_parallel_layers_per_stage"
        )
    sums = [0, *accumulate(costs)]

    def cost(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + first * (begin == 0) + last * (end == blocks)

    def add_to_maximum(value: float, begin: int, end: int) -> float:
        return max(value, cost(begin, end))

    least, _ = _best_split(blocks, stages, add_to_maximum)

    def add_to_squares(value: float, begin: int, end: int) -> float:
        return value + cost(begin, end) ** 2 if cost(begin, end) <= least else float("inf")

    return _best_split(blocks, stages, add_to_squares)[1]


def _best_split(
    blocks: int, stages: int, add_stage: Callable[[float, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the minimal value of a split and the index of each stage's first block, by dynamic programming.

    `add_stage(value, begin, end)` returns the value of a split after a stage of the blocks `begin` to `end` is appended.
    """
    # The best split of the blocks before each key, as (value, first blocks of the stages).
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for stages_left in reversed(range(stages)):
        ends = range(stages - stages_left, blocks - stages_left + 1) if stages_left else [blocks]
        best = {
            end: min(
                (add_stage(value, begin, end), (*starts, begin))
                for begin, (value, starts) in best.items()
                if begin < end
            )
            for end in ends
        }
    return best[blocks]


def stage_starts(names: Sequence[str], split_points: Sequence[str]) -> tuple[int, ...]:
    """Return the index of each stage's first block.

    Args:
        names: the names of the blocks, in order.
        split_points: the name of the first block of each stage after the first one.

    Raises:
        ParallelError: a split point is not a block, or does not come after the preceding one.
    """
    key = "pipeline_parallel_split_points"
    starts = [0]
    for point in split_points:
        if point not in names:
            suggestion = nearest(point, names)
            remedy = f"did you mean {suggestion}?" if suggestion else f"the last is {names[-1]}"
            raise ParallelError(f"{key}: {point} is not one of the {len(names)} blocks; {remedy}")
        if (index := names.index(point)) <= starts[-1]:
            raise ParallelError(
                f"{key}: {point} does not come after {names[starts[-1]]}, which begins a stage; name each block once, in "
                "order, and not the first"
            )
        starts.append(index)
    return tuple(starts)
