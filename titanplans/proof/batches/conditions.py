"""The conditions of a micro batch and of a training, as data.

sample.py makes their tensors; titanplans/proof/compare/training.py runs them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """One micro batch, by default a plain one."""

    size: int = 2
    """Sequences."""
    length: int = 16
    """Tokens of each."""
    padding: str = ""
    """"left" or "right": the side on which an attention mask fills each sequence up."""
    documents: bool = False
    """Each sequence holds several documents, by `cu_seqlens` or `position_ids`."""
    ignored: bool = False
    """Some labels don't count. Labels of padding never do."""
    repeated: bool = False
    """The same few tokens again and again."""
    text: bool = False
    """No images for a model that takes some."""


@dataclass(frozen=True)
class Scenario:
    """One training, and the settings that hold throughout it. The defaults are plain: one step of one batch."""

    steps: tuple[tuple[MicroBatch, ...], ...] = ((MicroBatch(),),)
    """Steps of the optimizer, each of several micro batches."""
    evaluated: tuple[MicroBatch, ...] = ()
    """After the first step the model is evaluated on each of these."""
    cached: bool = False
    """After the second step it is called with a cache."""
    frozen: str = ""
    """One of `FROZEN`: which parameters get no gradient. In the last of several steps the others get none instead."""
    recomputed: bool = False
    """The backward runs each block of the split model again."""
    differing: bool = False
    """Before the split each rank but the first holds values of its own."""
    fused: bool = False
    """In the last step the split model's head computes the loss, chunk by chunk; the whole model's comes from its logits."""
    dtype: str = "float64"

    @property
    def whole(self) -> "Scenario":
        """Return the scenario as the whole model sees it: those equal here share one reference."""
        return replace(self, recomputed=False, differing=False, fused=False)


PLAIN = Scenario()

FROZEN = ("mixers and MLPs", "parameters")
"""Frozen parameters, trainings alternate: all mixers, MLPs and the head, so that embeddings and norms train through
them; or all before the blocks, the first block, and every second parameter of the others."""


def words(scenario: Scenario, plain: Scenario) -> tuple[str, ...]:
    """Return in words the conditions in which `scenario` is not `plain`, each once."""
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
