"""Which part of a corpus is for training and which for validation.

A corpus that comes without a split of its own gets one that is the same on every rank and in every
run: one part in twenty is kept for validation. No random state is involved, so the two sides of a
split never meet, whatever the job's seed.
"""

import hashlib
from collections.abc import Sequence

from titanplans.errors import DataError

SPLITS = ("train", "validation", "all")
VALIDATION_EVERY = 20
"""One file, or document, in this many is for validation: 5 %."""


def check_split(split: str) -> None:
    """Raises DataError unless `split` is one that a corpus without splits of its own can serve."""
    if split not in SPLITS:
        raise DataError(
            f"dataset_split = {split!r}: a local corpus has the splits {', '.join(map(repr, SPLITS))}"
        )


def split_names(names: Sequence[str], split: str) -> list[int]:
    """Indices into `names` (paths relative to the corpus) that belong to `split`.

    Validation gets the names with the smallest hashes, one in twenty, rounded up: it is never empty
    and never lopsided, and moving the corpus to another folder moves no file to the other side.
    """
    check_split(split)
    if split == "all":
        return list(range(len(names)))
    by_hash = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    held_out = set(by_hash[: -(-len(names) // VALIDATION_EVERY)])
    return [i for i in range(len(names)) if (i in held_out) == (split == "validation")]


def split_size(documents: int, split: str) -> int:
    """How many of `documents` belong to `split` when every twentieth, from the first on, is for validation."""
    held_out = -(-documents // VALIDATION_EVERY)
    return {"all": documents, "validation": held_out, "train": documents - held_out}[split]


def split_index(i: int, split: str) -> int:
    """The number, within all documents, of the `i`-th document of `split`."""
    if split == "all":
        return i
    if split == "validation":
        return i * VALIDATION_EVERY
    return i + i // (VALIDATION_EVERY - 1) + 1


def in_split(number: int, split: str) -> bool:
    """Whether document `number` of all documents belongs to `split`; the inverse of `split_index`."""
    return split == "all" or (number % VALIDATION_EVERY == 0) == (split == "validation")
