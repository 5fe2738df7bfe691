"""The conditions of a micro batch and of a training, as data. Start at `Scenario`."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """The conditions of one micro batch. The defaults have no condition."""

    size: int = 2
    """Number of sequences."""
    length: int = 16
    """Tokens in each sequence."""
    padding: str = ""
    """"left" or "right": the side on which an attention mask marks padding."""
    documents: bool = False
    """Each sequence holds several documents, which `cu_seqlens` or `position_ids` mark."""
    ignored: bool = False
    """Some labels are ignored by the loss. Labels of padding always are."""
    repeated: bool = False
    """All tokens are of the same few ids."""
    text: bool = False
    """Text alone, also for a model that takes images."""


@dataclass(frozen=True)
class Scenario:
    """One training, and the settings that hold throughout it. The defaults have no condition: one step of one batch."""

    steps: tuple[tuple[MicroBatch, ...], ...] = ((MicroBatch(),),)
    """The micro batches of each optimizer step."""
    evaluated: tuple[MicroBatch, ...] = ()
    """Batches on which the model is evaluated after the first step."""
    cached: bool = False
    """The model is called with a cache after the second step, or after an only step."""
    frozen: str = ""
    """One of `FROZEN`: which parameters are frozen. In the last of several steps the others are frozen instead."""
    recomputed: bool = False
    """The backward recomputes each block of the split model."""
    differing: bool = False
    """Before the split, every rank but the first has other weights."""
    fused: bool = False
    """In the last step the split model's head computes the loss in chunks; the unsplit model's is computed from logits."""
    dtype: str = "float64"

    @property
    def unsplit(self) -> "Scenario":
        """The scenario of the unsplit model. Scenarios for which it is equal are compared with one reference."""
        return replace(self, recomputed=False, differing=False, fused=False)


PLAIN = Scenario()

FROZEN = ("mixers and MLPs", "parameters")
"""Which parameters are frozen; trainings alternate between the two. The first: all mixers, MLPs and the head, so that
embeddings and norms train through them. The second: all before the blocks, the first block, and every second parameter of
the others."""


def words(scenario: Scenario, plain: Scenario) -> tuple[str, ...]:
    """Describe the conditions of `scenario` that `plain` does not have, each once."""
    conditions = []
    for batch in itertools.chain(*scenario.steps, scenario.evaluated):
        conditions += _batch_words(batch, plain.steps[0][0])
    if len(scenario.steps) > 1:
        conditions.append(f"{len(scenario.steps)} steps")
    if any(len(step) > 1 for step in scenario.steps):
        conditions.append("several micro batches in a step")
    conditions += [
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
        conditions.append(scenario.dtype)
    return tuple(dict.fromkeys(conditions))


def _batch_words(batch: MicroBatch, plain: MicroBatch) -> Iterator[str]:
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
