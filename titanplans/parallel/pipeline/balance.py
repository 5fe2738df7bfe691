"""Where a pipeline's stages begin and end: at named blocks, or so that the costliest stage is as cheap as can be.

balance([1, 1, 1, 1], first=0, last=1, stages=2)    # (0, 2): stages of two blocks, which cost 2 and 3
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from titanplans.errors import ParallelError, nearest
from titanplans.text import counted


def balance(costs: Sequence[int], first: int, last: int, stages: int) -> tuple[int, ...]:
    """Cut blocks into stages of consecutive blocks, each of one or more; return the number of each stage's first block.

    The costliest stage sets the pace of a pipeline. Among the cuts where it costs the least, the most even one is chosen (by
    the sum of squares), then the one whose early stages have the fewest blocks, since they hold the most activations.

    Args:
        costs: of each block, such as FLOPs.
        first: cost of the code in front of the blocks (embedding), which is in the first stage.
        last: cost of the code behind the blocks (norm, head), which is in the last stage.
        stages: how many.

    Raises:
        ParallelError: more stages than blocks.
    """
    number = len(costs)
    if not 1 <= stages <= number:
        raise ParallelError(
            f"{counted(stages, 'stage')} of {counted(number, 'block')}: a stage has one block or more; lower "
            "pipeline_parallel_degree, or raise pipeline_parallel_layers_per_stage"
        )
    sums = [0, *accumulate(costs)]

    def cost(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + first * (begin == 0) + last * (end == number)

    def slowest(before: float, begin: int, end: int) -> float:
        return max(before, cost(begin, end))

    least, _ = _best_cut(number, stages, slowest)

    def squares(before: float, begin: int, end: int) -> float:
        return before + cost(begin, end) ** 2 if cost(begin, end) <= least else float("inf")

    return _best_cut(number, stages, squares)[1]


def _best_cut(
    number: int, stages: int, added: Callable[[float, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the least value of a cut and where its stages begin, by dynamic programming.

    `added` makes of the value of the stages before `begin` that with the stage from `begin` to `end`.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}  # by where the stages so far end
    for left in reversed(range(stages)):
        ends = range(stages - left, number - left + 1) if left else [number]
        best = {
            end: min((added(value, at, end), (*cut, at)) for at, (value, cut) in best.items() if at < end)
            for end in ends
        }
    return best[number]


def starts_of_names(names: Sequence[str], split_points: Sequence[str]) -> tuple[int, ...]:
    """Return the number of each stage's first block, of blocks called `names`, where each of the `split_points` begins one.

    Raises:
        ParallelError: one is not a block, or does not come after the one before it; the first stage begins at block 0.
    """
    key = "pipeline_parallel_split_points"
    starts = [0]
    for point in split_points:
        if point not in names:
            meant = nearest(point, names)
            instead = f"did you mean {meant}?" if meant else f"the last is {names[-1]}"
            raise ParallelError(f"{key}: {point} is not one of the {len(names)} blocks; {instead}")
        if (at := names.index(point)) <= starts[-1]:
            raise ParallelError(
                f"{key}: {point} does not come after {names[starts[-1]]}, which begins a stage; name each block once, in "
                "order, and not the first"
            )
        starts.append(at)
    return tuple(starts)
