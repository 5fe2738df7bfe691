"""A corpus as the loader sees it: the documents of an epoch, in order, for one reader of many.

`open_source` turns the three settings `dataset`, `dataset_path` and `split` into a Source. How files
are read is in `local.py`, how the hub is in `hub.py`; tokens and sequences come later.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from titanplans.config.sections.data import Corpus
from titanplans.errors import DataError
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.corpus.column import TextColumn
from titanplans.training.data.corpus.hub import HubDocuments
from titanplans.training.data.corpus.local import (
    FORMATS,
    SPLITS,
    STDLIB_FRAGMENT_BYTES,
    TextFiles,
    find_files,
    stdlib_files,
    stdlib_root,
)
from titanplans.training.data.corpus.rows import Conversations, RowDocuments


class Shuffled:
    """Indexed documents: every epoch in another order, drawn from (seed, epoch).

    Attributes:
        identity: what must be the same for a saved position to mean the same document.
        summary: of conversations: how many are read, and how many are left out, in words.
        size: documents in an epoch; None if they are not counted.
        files: names, which are the same wherever the corpus lies, and paths; empty if it is not on this machine.
    """

    def __init__(self, corpus: TextFiles | RowDocuments, identity: dict[str, Any], seed: int) -> None:
        self._corpus, self._seed = corpus, seed
        self.files, self.size = corpus.files, len(corpus)
        self.summary = corpus.summary if isinstance(corpus, Conversations) else None
        self.identity = identity | corpus.identity | {"seed": seed}

    def choose_readers(self, counts: Sequence[int]) -> int:
        """Return the first of `counts` into which the corpus can be divided.

        With fewer documents than ranks and workers they share one reader, in turns.
        """
        return next((count for count in counts if count <= len(self._corpus)), 1)

    def documents(self, epoch: int, reader: int, readers: int, start: Any) -> Iterator[tuple[int, Any]]:
        """Yield the documents of `epoch` that belong to `reader` of `readers`, from `start` on.

        A document is a text, or the `Tokens` of a conversation. Each comes with its position, here its number in the
        reader's order: a JSON value that, given as `start`, begins with that very document. The readers of an epoch are
        disjoint and together are the corpus.
        """
        order = _order(self._seed, epoch, len(self._corpus))[reader::readers]
        for position in range(start or 0, len(order)):
            yield position, self._corpus.document(int(order[position]))


Source = Shuffled | HubDocuments
"""Documents in a fixed order for each epoch."""


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, documents: int) -> np.ndarray:
    """The order of an epoch, which all its readers share; two epochs, because readers end theirs at different steps."""
    return np.random.default_rng([seed, epoch]).permutation(documents)


def open_source(of: Corpus, *, seed: int = 0, chat: ChatFormat | None = None) -> Source:
    """The corpus that the job's settings name.

    Args:
        of: its `dataset` is 'stdlib'; 'local', or one of FORMATS to read files as that format whatever their extension;
            anything else is the name of a Hugging Face data set. With 'local' or a format its `dataset_path` is a file, a
            folder or a glob. 'stdlib', being the default, gives way to a path: a path alone reads local files. With a
            Hugging Face name, a local copy of it.
        seed: of the order of the documents.
        chat: reads rows as conversations; None: as texts, or text files.

    Raises:
        DataError: the corpus isn't there, can't be read or holds nothing.
    """
    dataset, path, split = of.dataset, of.dataset_path, of.dataset_split
    by_format, shown = dataset == "local" or dataset in FORMATS, path or dataset
    if by_format and path is None:
        raise DataError(f"dataset = {dataset!r}: needs a dataset_path, which is a file, a folder or a glob")
    if not by_format and dataset != "stdlib":
        return HubDocuments(dataset, path, split, chat or TextColumn(of.text_column))
    if split not in SPLITS:
        raise DataError(
            f"dataset_split = {split!r}: a local corpus has the splits {', '.join(map(repr, SPLITS))}"
        )
    root, files, file_format = stdlib_root(), [], "text"
    if path is not None:
        root, files, file_format = find_files(path, dataset if dataset in FORMATS else None)
    if file_format == "text" and chat is not None:
        raise DataError(
            f"dataset = {shown!r}: holds texts, and chat.enable = true reads conversations; give .jsonl or .parquet files, "
            "or leave chat out"
        )
    corpus: TextFiles | RowDocuments
    if path is None:
        corpus = TextFiles(root, stdlib_files(root), split, STDLIB_FRAGMENT_BYTES)
    elif file_format == "text":
        corpus = TextFiles(root, files, split)
    elif chat is not None:
        corpus = Conversations(root, files, file_format, split, chat)
    else:
        corpus = RowDocuments(root, files, file_format, split, TextColumn(of.text_column))
    if len(corpus) == 0:
        what = chat.what_is_left_out() if chat else "no document"
        raise DataError(
            f"dataset = {shown!r}: holds {what} for dataset_split = {split!r}; every twentieth, from "
            f"the first on, is for validation: give more documents, or validation data as a dataset_path of its own"
        )
    return Shuffled(corpus, {"dataset": shown, "split": split}, seed)
