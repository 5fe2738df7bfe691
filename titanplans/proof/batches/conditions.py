"""The conditions of a micro batch and of a training, as data. Start at `Scenario`."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """One micro batch. A field that differs from its default is a condition of the proof, such as padding."""

    size: int = 2
    """Number of sequences."""
    length: int = 16
    """Tokens in each sequence."""
    padding: str = ""
    """"left" or "right": the side on which an attention mask marks padding."""
    documents: bool = False
    """Each sequence has several documents; `cu_seqlens` or `position_ids` mark where they begin."""
    ignored: bool = False
    """The loss ignores some labels. It always ignores the labels of padding."""
    repeated: bool = False
    """All tokens are of the same few ids."""
    text: bool = False
    """Text alone, also for a model that takes images."""


@dataclass(frozen=True)
class Scenario:
    """One training, and its settings. With the defaults no condition holds: one step of one plain batch."""

    steps: tuple[tuple[MicroBatch, ...], ...] = ((MicroBatch(),),)
    """The micro batches of each optimizer step."""
    evaluated: tuple[MicroBatch, ...] = ()
    """Batches on which the model is evaluated after the first step."""
    cached: bool = False
    """The model is called with a cache after the second step, or after the first one if there is only one."""
    frozen: str = ""
    """One of `FROZEN`: which parameters are frozen; "": none. The last of several steps freezes all other parameters
    instead."""
    recomputed: bool = False
    """The backward recomputes each block of the split model."""
    differing: bool = False
    """Before the split, every rank but the first has other weights."""
    fused: bool = False
    """In the last step the split model's head computes the loss in chunks; the loss of the unsplit model comes from its
    logits."""
    dtype: str = "float64"

    @property
    def unsplit(self) -> "Scenario":
        """The scenario of the unsplit model. Scenarios with the same unsplit scenario are compared with one reference."""
        return replace(self, recomputed=False, differing=False, fused=False)


PLAIN = Scenario()

FROZEN = ("mixers and MLPs", "parameters")
"""Which parameters are frozen; trainings alternate between the two choices. "mixers and MLPs": all mixers, all MLPs and
the head, so that gradients of embeddings and norms pass through frozen modules. "parameters": all parameters before the
blocks, the first block, and every second parameter of the other blocks."""


def words(scenario: Scenario, plain: Scenario) -> tuple[str, ...]:
    """Describe each condition of `scenario` that `plain` does not have."""
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
