"""The trainings of a proof, and the cases that cover every pair of conditions."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from titanplans.plan.options import TPOptions
from titanplans.proof.batches.conditions import FROZEN, MicroBatch, Scenario
from titanplans.split.layout import next_multiple

# Every pair of two columns is in one of the rows ("block" counts as long); the two batches of a step differ in length.
# Columns: sequences, length, padding or documents, ignored labels, repeated tokens, text alone.
# tests/proof/batches/test_conditions.py counts the pairs. No training begins with a long sequence: bfloat16's rounding may
# hide its gradients, and with them all later steps.
_ROWS = (
    ((2, "even", "", 0, 0, 0), (3, "odd", "left", 1, 0, 0)),
    ((2, "long", "right", 1, 1, 0), (3, "short", "documents", 1, 1, 1)),
    ((1, "even", "documents", 0, 1, 0), (3, "odd", "", 1, 1, 1)),
    ((2, "even", "left", 1, 1, 1), (2, "odd", "documents", 0, 0, 1)),
    ((1, "long", "documents", 1, 1, 1), (2, "short", "left", 0, 1, 0)),
    ((1, "odd", "right", 1, 1, 0), (3, "even", "right", 0, 0, 1)),
    ((3, "short", "right", 0, 0, 0), (3, "block", "", 1, 1, 1)),
    ((1, "odd", "", 0, 0, 0), (2, "even", "", 0, 0, 0)),
    ((1, "long", "left", 0, 0, 1), (1, "short", "", 0, 1, 0)),
)
_EVALUATED = ((1, "longest", "right", 0, 0, 0), (1, "short", "", 0, 0, 0))
"""The first two trainings are evaluated on one of these each, and on a batch like one of their first step. Both lengths are
odd: ranks that share a sequence can't share it equally, so that the forward runs in full."""
STEPS = (3, 2, 2, 2)
"""Steps of each training, all rows in total. The first is the longest: a quick proof takes it alone."""
SHORT = 3
"""Tokens: fewer than ranks at degrees 4 and 8."""


def trainings(batch: MicroBatch, block: int, shards: int = 1) -> tuple[Scenario, ...]:
    """Return trainings of steps of two micro batches, which together cover every pair of a batch's conditions.

    The first two are evaluated, and the first is called with a cache.

    Args:
        batch: the plain one.
        block: tokens in the largest window or chunk; one sequence is as long, long ones have two more.
        shards: so many ranks share a sequence, and divide the lengths of the steps' batches: they are rounded up, and stay
            different. Evaluations keep theirs.
    """
    odd = batch.length - (1 if batch.length % 2 == 0 else 2)
    lengths = {"even": batch.length, "odd": max(odd, 1), "short": SHORT, "long": block + 2, "block": block}
    evaluated = lengths | {"longest": block + 2 | 1}
    if shards > 1:
        lengths["odd"] = batch.length + 1  # rounded up it is another length than the even one
        multiple = 0
        for name in sorted(lengths, key=lengths.__getitem__):
            multiple = lengths[name] = next_multiple(max(lengths[name], multiple + 1), shards)

    def one(row: tuple[int, str, str, int, int, int], lengths: Mapping[str, int] = lengths) -> MicroBatch:
        size, length, kind, ignored, repeated, text = row
        return MicroBatch(
            size=(1, batch.size, batch.size + 1)[size - 1],
            length=lengths[length],
            padding=kind if kind in ("left", "right") else "",
            documents=kind == "documents",
            ignored=bool(ignored),
            repeated=bool(repeated),
            text=bool(text),
        )

    steps = tuple(tuple(one(row) for row in step) for step in _ROWS)
    ends = tuple(itertools.accumulate(STEPS))
    trained = [Scenario(steps[end - length : end]) for length, end in zip(STEPS, ends, strict=True)]
    for number, row in enumerate(_EVALUATED):
        # Of an earlier batch's shape, but padded or packed differently: a mask that is cached by shape would be wrong.
        again = next(
            batch for batch in reversed(trained[number].steps[0]) if batch.padding or batch.documents
        )
        trained[number] = replace(trained[number], evaluated=(again, one(row, evaluated)), cached=number == 0)
    return tuple(trained)


def cover(
    grid: Sequence[TPOptions],
    trained: Sequence[Scenario],
    shared: Sequence[Scenario],
    dtypes: Sequence[str],
    *,
    recompute: bool = True,
    fuse: bool = True,
    quick: bool = False,
) -> list[tuple[TPOptions, Scenario]]:
    """Return cases in which every choice of options of `grid` is proved, and every pair of conditions.

    The conditions are the degree, loss and sequence parallelism, the training, frozen parameters, recomputed blocks,
    values that differ between the ranks before the split, and the dtype; further dtypes are paired at the smallest
    degree, without stages. Greedy, as in Cohen et al. 1997, "The AETG system": the next case covers the most pairs that
    are left.

    Args:
        grid: choices of options; each is proved in the first dtype.
        trained: trainings, as `trainings` makes them.
        shared: the same, for options under which ranks share a sequence.
        dtypes: of weights and activations; the first is the proof's own.
        recompute: the model has blocks to recompute.
        fuse: its head can compute the loss; it does so in every second case, and no case is added for that.
        quick: every condition once instead of every pair, at the smallest degree alone.
    """
    blocks = (False, True) if recompute else (False,)
    states = list(itertools.product(range(len(trained)), (False, True), blocks, (False, True)))
    smallest = min(options.degrees.tp_cp for options in grid)
    cheap = [options for options in grid if options.degrees.tp_cp == smallest]
    fewest = min(options.degrees.pp for options in cheap)
    parts = _single if quick else _pairs
    rows = [(o, d) for o in cheap for d in (dtypes if o.degrees.pp == fewest else dtypes[:1])]
    if not quick:
        rows += [(o, dtypes[0]) for o in grid if o.degrees.tp_cp != smallest]
    every = [(*row, *state) for row in rows for state in states]
    covered: set[Any] = set()

    def pick(candidates: list[tuple]) -> tuple:
        best = max(candidates, key=lambda row: len(parts(row) - covered))
        covered.update(parts(best))
        return best

    fixed = [] if quick else grid
    chosen = [pick([(options, dtypes[0], *state) for state in states]) for options in fixed]
    wanted = set().union(*map(parts, every))
    while wanted - covered:
        chosen.append(pick(every))
    return [
        (
            options,
            replace(
                trained[t] if options.shards == 1 else shared[t],
                frozen=FROZEN[t % len(FROZEN)] if frozen else "",
                recomputed=again,
                differing=differing,
                fused=fuse and (_apart(options, grid) if number < len(fixed) else number) % 2 == 0,
                dtype=dtype,
            ),
        )
        for number, (options, dtype, t, frozen, again, differing) in enumerate(chosen)
    ]


def _apart(options: TPOptions, grid: Sequence[TPOptions]) -> int:
    """Return the distance of `options` from the first of `grid`: in a full grid each degree and choice has even ones."""
    first, degrees = grid[0], list(dict.fromkeys(one.degrees for one in grid))
    others = (
        options.loss_parallel != first.loss_parallel,
        options.sequence_parallel != first.sequence_parallel,
    )
    return degrees.index(options.degrees) + sum(others)


def _single(row: tuple) -> set[Any]:
    options, *rest = row
    return set(enumerate((options.degrees, options.loss_parallel, options.sequence_parallel, *rest)))


def _pairs(row: tuple) -> set[Any]:
    return set(itertools.combinations(sorted(_single(row), key=lambda part: part[0]), 2))
