"""The conditions of a proof: what its trainings run through, and which cases are proved so that every pair is covered.

No tensors here: titanplans/proof/sample.py makes them, titanplans/proof/training.py runs them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from titanplans.plan.plan import TPOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """One micro batch. The defaults are those of a plain one."""

    size: int = 2
    """Sequences."""

    length: int = 16
    """Tokens of each."""

    padding: str = ""
    """"left" or "right": each sequence is filled up there, by an attention mask."""

    documents: bool = False
    """Each sequence is several documents, by `cu_seqlens` or `position_ids`."""

    ignored: bool = False
    """Some labels don't count. Those of padding never do."""

    repeated: bool = False
    """The same few tokens again and again."""

    text: bool = False
    """No images, where the model takes some."""


@dataclass(frozen=True)
class Scenario:
    """One training, and what is true throughout it. The defaults are those of a plain one: one step of one batch."""

    steps: tuple[tuple[Batch, ...], ...] = ((Batch(),),)
    """Of the optimizer, each of several micro batches."""

    evaluated: tuple[Batch, ...] = ()
    """After the first step the model is evaluated on each of these."""

    cached: bool = False
    """After the second step it is called with a cache."""

    frozen: str = ""
    """One of `FROZEN`: what gets no gradient, until of several steps the last: there all others get none."""

    recomputed: bool = False
    """Each block of the split model is run again in the backward."""

    differing: bool = False
    """Before the split each rank but the first holds values of its own."""

    fused: bool = False
    """In the last step the head of the split model computes the loss, chunk by chunk; the whole model's is of its logits."""

    dtype: str = "float64"

    @property
    def whole(self) -> "Scenario":
        """What of it the whole model sees: scenarios that are equal here have one reference."""
        return replace(self, recomputed=False, differing=False, fused=False)


PLAIN = Scenario()

FROZEN = ("mixers and MLPs", "parameters")
"""What is frozen, of one training the first, of the next the second: all mixers and MLPs and the head, so that embeddings
and norms train through them; or what stands before the blocks, the first block, and every second parameter of the others."""

# Every pair of two columns is in one of the rows, "block" being a long one; the two of a step differ in length. Columns:
# sequences, length, padding or documents, ignored labels, repeated tokens, text alone.
# tests/proof/test_proof_conditions.py counts the pairs. No training begins with a long sequence: in bfloat16 rounding may
# hide its gradients, and all that follows.
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
_EVALUATED = ((1, "long", "right", 0, 0, 0), (1, "short", "", 0, 0, 0))
"""The first and the second training are evaluated on one of these each, beside a batch as they have had before."""
STEPS = (3, 2, 2, 2)
"""Of the trainings that share the rows. The first is the longest, since a quick proof takes it alone."""
SHORT = 3
"""Tokens: fewer than ranks at degrees 4 and 8, so that some hold none."""


def trainings(batch: Batch, block: int) -> tuple[Scenario, ...]:
    """Return trainings of steps of two micro batches, which together hold every pair of conditions of a batch.

    The first two are evaluated, and the first is called with a cache.

    Args:
        batch: the plain one.
        block: the most tokens that are treated together: a window, or a chunk. A long sequence has two more, one as many.
    """
    odd = batch.length - (1 if batch.length % 2 == 0 else 2)
    lengths = {"even": batch.length, "odd": max(odd, 1), "short": SHORT, "long": block + 2, "block": block}

    def one(size: int, length: str, kind: str, ignored: int, repeated: int, text: int) -> Batch:
        return Batch(
            size=(1, batch.size, batch.size + 1)[size - 1],
            length=lengths[length],
            padding=kind if kind in ("left", "right") else "",
            documents=kind == "documents",
            ignored=bool(ignored),
            repeated=bool(repeated),
            text=bool(text),
        )

    steps = tuple(tuple(one(*row) for row in step) for step in _ROWS)  # type: ignore[arg-type]
    ends = tuple(itertools.accumulate(STEPS))
    trained = [Scenario(steps[end - length : end]) for length, end in zip(STEPS, ends, strict=True)]
    for number, row in enumerate(_EVALUATED):
        # Of the shape of one before, but padded or packed in another way: a mask that is kept by its shape is another's.
        again = next(
            batch for batch in reversed(trained[number].steps[0]) if batch.padding or batch.documents
        )
        trained[number] = replace(trained[number], evaluated=(again, one(*row)), cached=number == 0)  # type: ignore[arg-type]
    return tuple(trained)


def cover(
    grid: Sequence[TPOptions],
    trained: Sequence[Scenario],
    dtypes: Sequence[str],
    *,
    recompute: bool = True,
    fuse: bool = True,
    quick: bool = False,
) -> list[tuple[TPOptions, Scenario]]:
    """Return cases in which every choice of options of `grid` is proved, and every pair of conditions.

    The conditions are the degree, loss and sequence parallelism, which training, part of it frozen, blocks that are
    recomputed, values that differ between the ranks before the split, and the dtype; dtypes but the first are paired
    at the smallest degree. Greedy, as in Cohen et al. 1997, "The AETG system": the next case is the one that covers most
    of what is left.

    Args:
        grid: choices of options, each of which is proved in the first dtype.
        trained: trainings, as `trainings` makes them.
        dtypes: of weights and activations; the first is that of the proof.
        recompute: the model has blocks.
        fuse: its head can compute the loss, which then every second case has it do: so no case is added for that.
        quick: every condition once, not every pair, and the smallest degree alone.
    """
    blocks = (False, True) if recompute else (False,)
    states = list(itertools.product(range(len(trained)), (False, True), blocks, (False, True)))
    smallest = min(options.degree for options in grid)
    cheap = [options for options in grid if options.degree == smallest]
    parts = _single if quick else _pairs
    rows = [(o, d) for o in cheap for d in dtypes]
    if not quick:
        rows += [(o, dtypes[0]) for o in grid if o.degree != smallest]
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
                trained[t],
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
    """Return how far `options` are from the first of `grid`: those an even number away hold each degree and each choice."""
    first, degrees = grid[0], list(dict.fromkeys(one.degree for one in grid))
    others = (
        options.loss_parallel != first.loss_parallel,
        options.sequence_parallel != first.sequence_parallel,
    )
    return degrees.index(options.degree) + sum(others)


def _single(row: tuple) -> set[Any]:
    options, *rest = row
    return set(enumerate((options.degree, options.loss_parallel, options.sequence_parallel, *rest)))


def _pairs(row: tuple) -> set[Any]:
    return set(itertools.combinations(sorted(_single(row), key=lambda part: part[0]), 2))


def simpler(scenario: Scenario, plain: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Return a scenario that fails as `scenario` does, with as few conditions as one pass over them finds.

    By delta debugging (Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input"): one condition
    after the other is taken away, and stays away if what is left still fails; those first that leave out most.
    """

    def take(candidate: Scenario) -> bool:
        nonlocal scenario
        if candidate == scenario or not fails(candidate):
            return False
        scenario = candidate
        return True

    batches = dict.fromkeys(itertools.chain(*scenario.steps))
    if sum(map(len, scenario.steps)) > 1 and not any(
        take(replace(scenario, steps=((batch,),))) for batch in batches
    ):
        for at in reversed(range(len(scenario.steps))):
            if len(scenario.steps) > 1:
                take(replace(scenario, steps=_without(scenario.steps, at)))
        for at, step in enumerate(scenario.steps):
            for left in reversed(range(len(step))):
                if len(one := scenario.steps[at]) > 1:
                    steps = (*scenario.steps[:at], _without(one, left), *scenario.steps[at + 1 :])
                    take(replace(scenario, steps=steps))
    for name, value in _settings(plain):
        if name != "steps":
            take(replace(scenario, **{name: value}))  # type: ignore[arg-type]
    any(take(replace(scenario, evaluated=(batch,))) for batch in scenario.evaluated)
    for name, value in _settings(plain.steps[0][0]):
        take(replace(scenario, steps=tuple(_set(step, name, value) for step in scenario.steps)))
        take(replace(scenario, evaluated=_set(scenario.evaluated, name, value)))
    return scenario


def _set(batches: tuple[Batch, ...], name: str, value: Any) -> tuple[Batch, ...]:
    return tuple(replace(batch, **{name: value}) for batch in batches)


def _without(items: tuple[T, ...], at: int) -> tuple[T, ...]:
    return items[:at] + items[at + 1 :]


def _settings(thing: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(thing, field.name)) for field in fields(thing))


def words(scenario: Scenario, plain: Scenario) -> tuple[str, ...]:
    """Return in words what of `scenario` is not `plain`: each condition once."""
    found = []
    for batch in itertools.chain(*scenario.steps, scenario.evaluated):
        found += _batch_words(batch, plain.steps[0][0])
    if len(scenario.steps) > 1:
        found.append(f"{len(scenario.steps)} steps")
    if any(len(step) > 1 for step in scenario.steps):
        found.append("several micro batches in a step")
    found += [
        text
        for name, text in (
            ("evaluated", "an evaluation"),
            ("cached", "a cache"),
            ("frozen", f"frozen {scenario.frozen}"),
            ("recomputed", "recomputed blocks"),
            ("differing", "values that differ between the ranks before the split"),
            ("fused", "a loss that the head computes"),
        )
        if getattr(scenario, name)
    ]
    if scenario.dtype != plain.dtype:
        found.append(scenario.dtype)
    return tuple(dict.fromkeys(found))


def _batch_words(batch: Batch, plain: Batch) -> Iterator[str]:
    if batch.size != plain.size:
        yield f"a batch of {batch.size}"
    if batch.length != plain.length:
        yield f"{batch.length} tokens"
    if batch.padding:
        yield f"{batch.padding} padding"
    for name, text in (
        ("documents", "documents in a sequence"),
        ("ignored", "ignored labels"),
        ("repeated", "repeated tokens"),
        ("text", "text without images"),
    ):
        if getattr(batch, name):
            yield text
