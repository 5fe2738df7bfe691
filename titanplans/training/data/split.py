"""Which part of a corpus is for training and which for validation.

A corpus that comes without a split of its own gets one that is the same on every rank and in every
run: one part in twenty is kept for validation. No random state is involved, so the two sides of a
split never meet, whatever the job's seed.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

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


def in_split(numbers: np.ndarray, split: str) -> np.ndarray:
    """Whether each document, by its number, belongs to `split`: every twentieth, from the first on, is for validation."""
    check_split(split)
    return (split == "all") | ((numbers % VALIDATION_EVERY == 0) == (split == "validation"))
