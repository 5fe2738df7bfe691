"""The trainings of a proof, and the cases that cover every pair of conditions. Start at `trainings` and `cover`."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from titanplans.plan.options import TPOptions
from titanplans.proof.batches.conditions import FROZEN, MicroBatch, Scenario
from titanplans.split.layout import next_multiple

# The two micro batches of each step. Columns: sequences, length, padding or documents, ignored labels, repeated tokens,
# text alone. Every pair of values of two columns occurs in some row ("block" counts as "long"), as
# tests/proof/batches/test_conditions.py checks. The two batches of a step differ in length. No training begins with a long
# sequence: in bfloat16 rounding may hide its gradients, and then also the gradients of all later steps.
_STEPS = (
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
"""For each of the first two trainings, a batch of its evaluation. Both lengths are odd, so ranks can't shard the sequence
equally and the forward runs in full."""
STEPS = (3, 2, 2, 2)
"""Number of steps of each training; together they are all of `_STEPS`. The first training is the longest: a quick proof
has only this one."""
SHORT = 3
"""Tokens of a short sequence: fewer than there are ranks at degrees 4 and 8."""


def trainings(batch: MicroBatch, block: int, shards: int = 1) -> tuple[Scenario, ...]:
    """Return trainings that together cover every pair of a batch's conditions; each step has two micro batches.

    The first two have an evaluation, and the first has forwards with a cache.

    Args:
        batch: the batch without conditions. The sizes and lengths of the other batches are derived from it.
        block: tokens in the largest window or chunk. A "block" sequence has this many tokens, a "long" sequence two more.
        shards: number of ranks that a sequence is sharded over. Lengths in training are rounded up to multiples of
            `shards`, and stay different from each other. Lengths in an evaluation are not rounded.
    """
    odd = batch.length - (1 if batch.length % 2 == 0 else 2)
    lengths = {"even": batch.length, "odd": max(odd, 1), "short": SHORT, "long": block + 2, "block": block}
    evaluated = lengths | {"longest": block + 2 | 1}
    if shards > 1:
        lengths["odd"] = batch.length + 1  # rounded up, it differs from the even length
        multiple = 0
        for name in sorted(lengths, key=lengths.__getitem__):
            multiple = lengths[name] = next_multiple(max(lengths[name], multiple + 1), shards)

    def make_batch(
        row: tuple[int, str, str, int, int, int], lengths: Mapping[str, int] = lengths
    ) -> MicroBatch:
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

    steps = tuple(tuple(make_batch(row) for row in step) for step in _STEPS)
    ends = tuple(itertools.accumulate(STEPS))
    scenarios = [Scenario(steps[end - length : end]) for length, end in zip(STEPS, ends, strict=True)]
    for index, row in enumerate(_EVALUATED):
        # This batch has the shape of an earlier batch, but other padding or documents. It reveals a mask that a model
        # caches by shape alone.
        same_shape = next(
            batch for batch in reversed(scenarios[index].steps[0]) if batch.padding or batch.documents
        )
        evaluation = (same_shape, make_batch(row, evaluated))
        scenarios[index] = replace(scenarios[index], evaluated=evaluation, cached=index == 0)
    return tuple(scenarios)


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
    """Return cases that cover all options of `grid` and every pair of conditions.

    The conditions are the degree, loss and sequence parallelism, the training, frozen parameters, recomputed blocks,
    weights that differ between the ranks before the split, and the dtype. Every dtype after the first is paired with the
    other conditions only at the smallest degree, without pipeline stages. Cases are chosen greedily, as in Cohen et al.
    1997, "The AETG system": the next case covers the most of the pairs that are left.

    Args:
        grid: options to prove, each at least once in the first dtype.
        trained: the trainings, from `trainings`.
        shared: the same trainings with other lengths, for options that shard the sequence.
        dtypes: dtypes of weights and activations; the first is the proof's main dtype.
        recompute: whether the model has blocks that can be recomputed.
        fuse: whether the model's head can compute the loss. The head then computes it in every second case; no case is
            added.
        quick: cover every condition once instead of every pair, at the smallest degree only.
    """
    blocks = (False, True) if recompute else (False,)
    states = list(itertools.product(range(len(trained)), (False, True), blocks, (False, True)))
    smallest = min(options.degrees.tp_cp for options in grid)
    cheap = [options for options in grid if options.degrees.tp_cp == smallest]
    fewest_stages = min(options.degrees.pp for options in cheap)
    conditions_of = _conditions if quick else _pairs
    rows = [(o, d) for o in cheap for d in (dtypes if o.degrees.pp == fewest_stages else dtypes[:1])]
    if not quick:
        rows += [(o, dtypes[0]) for o in grid if o.degrees.tp_cp != smallest]
    candidates = [(*row, *state) for row in rows for state in states]
    covered: set[Any] = set()

    def pick(candidates: list[tuple]) -> tuple:
        best = max(candidates, key=lambda row: len(conditions_of(row) - covered))
        covered.update(conditions_of(best))
        return best

    fixed = [] if quick else grid
    chosen = [pick([(options, dtypes[0], *state) for state in states]) for options in fixed]
    to_cover = set().union(*map(conditions_of, candidates))
    while to_cover - covered:
        chosen.append(pick(candidates))
    return [
        (
            options,
            replace(
                trained[t] if options.shards == 1 else shared[t],
                frozen=FROZEN[t % len(FROZEN)] if frozen else "",
                recomputed=recomputed,
                differing=differing,
                fused=fuse and (_distance(options, grid) if index < len(fixed) else index) % 2 == 0,
                dtype=dtype,
            ),
        )
        for index, (options, dtype, t, frozen, recomputed, differing) in enumerate(chosen)
    ]


def _distance(options: TPOptions, grid: Sequence[TPOptions]) -> int:
    """Return a distance of `options` from the first of `grid`.

    Cases with an even distance have a fused loss. In a full grid every degree, and every choice of an option, has such
    cases.
    """
    first, degrees = grid[0], list(dict.fromkeys(options.degrees for options in grid))
    others = (
        options.loss_parallel != first.loss_parallel,
        options.sequence_parallel != first.sequence_parallel,
    )
    return degrees.index(options.degrees) + sum(others)


def _conditions(row: tuple) -> set[Any]:
    options, *rest = row
    return set(enumerate((options.degrees, options.loss_parallel, options.sequence_parallel, *rest)))


def _pairs(row: tuple) -> set[Any]:
    return set(itertools.combinations(sorted(_conditions(row), key=lambda condition: condition[0]), 2))
