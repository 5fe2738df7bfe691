"""Where a pipeline's stages begin and end: at named blocks, or so that the costliest stage is as cheap as can be.

balance([1, 1, 1, 1], first=0, last=1, stages=2)    # ((0, 2), (2, 4)), which cost 2 and 3
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from titanplans.errors import ParallelError, nearest
from titanplans.text import counted

Bounds = tuple[tuple[int, int], ...]
"""The number of each stage's first block, and of the one behind its last."""


def balance(costs: Sequence[int], first: int, last: int, stages: int) -> Bounds:
    """Cut blocks into stages of consecutive blocks, each of one or more.

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

    return tuple(pairwise(_best_cut(number, stages, squares)[1]))


def _best_cut(
    number: int, stages: int, added: Callable[[float, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the least value of a cut and where its stages begin, and the last one ends, by dynamic programming.

    `added` makes of the value of the stages before `begin` that with the stage from `begin` to `end`.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, (0,))}  # by where the stages so far end
    for left in reversed(range(stages)):
        ends = range(stages - left, number - left + 1) if left else [number]
        best = {
            end: min((added(value, at, end), (*cut, end)) for at, (value, cut) in best.items() if at < end)
            for end in ends
        }
    return best[number]


def bounds_of_names(names: Sequence[str], split_points: Sequence[str]) -> Bounds:
    """Cut the blocks called `names` where each of the `split_points` begins a stage.

    Raises:
        ParallelError: one is not a block, is the first block, or does not come after the one before it.
    """
    key = "pipeline_parallel_split_points"
    cuts = [0]
    for point in split_points:
        if point not in names:
            meant = nearest(point, names)
            instead = f"did you mean {meant}?" if meant else f"the last is {names[-1]}"
            raise ParallelError(f"{key}: {point} is not one of the {len(names)} blocks; {instead}")
        at = names.index(point)
        if at == 0:
            raise ParallelError(f"{key}: {point} is the first block, which begins the first stage; remove it")
        if at <= cuts[-1]:
            before = names[cuts[-1]]
            raise ParallelError(
                f"{key}: {point} does not come after {before}; name each block once, in order"
            )
        cuts.append(at)
    return tuple(pairwise([*cuts, len(names)]))
