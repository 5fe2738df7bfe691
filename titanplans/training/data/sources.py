"""A corpus as the loader sees it: the documents of an epoch, in order, for one shard of many.

`open_source` turns the three settings `dataset`, `dataset_path` and `split` into a Source. How files
are read is in `local.py`, how the hub is in `hub.py`; tokens and windows come later.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from titanplans.errors import DataError
from titanplans.training.data.hub import Stream
from titanplans.training.data.local import FORMATS, TextFiles, find_files
from titanplans.training.data.rows import Rows
from titanplans.training.data.stdlib import STDLIB_PIECE_BYTES, stdlib_files, stdlib_root


class Source(Protocol):
    """Documents in a fixed order for each epoch."""

    identity: dict[str, Any]
    """What must be the same for a saved position to mean the same document."""

    @property
    def size(self) -> int | None:
        """How many documents there are, None where that is not known."""

    def documents(self, epoch: int, shard: int, shards: int, start: Any) -> Iterator[tuple[Any, str]]:
        """The documents of `epoch` that fall to `shard` of `shards`, from `start` on.

        Each comes with its position: a JSON value that, given as `start`, begins with that very
        document. The shards of an epoch are disjoint and together are the corpus.
        """


class Shuffled:
    """A Source over indexed documents: every epoch in another order, drawn from (seed, epoch)."""

    def __init__(self, corpus: TextFiles | Rows, identity: dict[str, Any], seed: int) -> None:
        self._corpus, self._seed = corpus, seed
        self.size = len(corpus)
        self.identity = identity | {"fingerprint": corpus.fingerprint, "documents": self.size, "seed": seed}

    def documents(self, epoch: int, shard: int, shards: int, start: int | None) -> Iterator[tuple[int, str]]:
        """See Source. A position is a number in the shard's own order."""
        order = np.random.default_rng([self._seed, epoch]).permutation(self.size)[shard::shards]
        for position in range(start or 0, len(order)):
            yield position, self._corpus.text(int(order[position]))


def open_source(
    dataset: str,
    dataset_path: str | None = None,
    *,
    split: str = "train",
    text_column: str = "text",
    seed: int = 0,
) -> Shuffled | Stream:
    """The corpus that the job's settings name.

    Args:
        dataset: 'stdlib'; 'local', or one of FORMATS to read files as that format whatever their
            extension; anything else is the name of a Hugging Face data set.
        dataset_path: with 'local' or a format, a file, a folder or a glob. 'stdlib', being the
            default, gives way to a path: a path alone reads local files. With a Hugging Face name, a
            local copy of it.
        split: 'train', 'validation' or 'all'; for a Hugging Face data set, one of its own splits.
        text_column: the column or field that holds the text, where there are such.
        seed: of the order of the documents.

    Raises:
        DataError: the corpus isn't there, can't be read or holds nothing.
    """
    by_format = dataset == "local" or dataset in FORMATS
    if by_format and dataset_path is None:
        raise DataError(f"dataset = {dataset!r}: needs a dataset_path, which is a file, a folder or a glob")
    local = by_format or (dataset == "stdlib" and dataset_path is not None)
    if not local and dataset != "stdlib":
        return Stream(dataset, dataset_path, split, text_column)
    identity = {"dataset": dataset_path if local else "stdlib", "split": split}
    if not local:
        root = stdlib_root()
        corpus: TextFiles | Rows = TextFiles(root, stdlib_files(root), split, STDLIB_PIECE_BYTES)
    else:
        root, files, file_format = find_files(str(dataset_path), dataset if dataset in FORMATS else None)
        if file_format == "text":
            corpus = TextFiles(root, files, split)
        else:
            corpus = Rows(files, file_format, split, text_column)
            identity["text_column"] = text_column
    if len(corpus) == 0:
        raise DataError(
            f"dataset = {dataset_path or dataset!r}: holds no document for dataset_split = {split!r}; every twentieth, from "
            f"the first on, is for validation: give more documents, or validation data as a dataset_path of its own"
        )
    return Shuffled(corpus, identity, seed)
