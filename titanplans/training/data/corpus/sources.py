"""`open_source`: open the corpus that `dataset`, `dataset_path` and `dataset_split` name, as ordered documents.

`local.py` and `rows.py` read files, and `hub.py` reads data sets of the hub. `Shuffled` orders the documents of files.
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
    is_hub_name,
    stdlib_files,
    stdlib_root,
)
from titanplans.training.data.corpus.rows import Conversations, RowDocuments


class Shuffled:
    """Documents of local files, in a random order that depends on (seed, epoch).

    Attributes:
        identity: values that a checkpoint stores. If they are equal in a job, a position means the same document in both.
        summary: for conversations, a line that says how many are used and how many are left out; else None.
        size: the number of documents in an epoch; None if they are not counted.
        files: pairs of name and path; names are relative to the corpus. Empty if the corpus is not on this machine.
    """

    def __init__(self, corpus: TextFiles | RowDocuments, identity: dict[str, Any], seed: int) -> None:
        self._corpus, self._seed = corpus, seed
        self.files, self.size = corpus.files, len(corpus)
        self.summary = corpus.summary if isinstance(corpus, Conversations) else None
        self.identity = identity | corpus.identity | {"seed": seed}

    def choose_readers(self, counts: Sequence[int]) -> int:
        """Return the first of `counts`, which are numbers of readers, that does not exceed the number of documents, else 1.

        If the result is 1, there are too few documents, and all ranks and workers read from the same reader in turn.
        """
        return next((count for count in counts if count <= len(self._corpus)), 1)

    def documents(self, epoch: int, reader: int, readers: int, start: Any) -> Iterator[tuple[int, Any]]:
        """Yield positions and documents of `epoch` that belong to `reader` (of `readers`), from position `start` on.

        A document is a text, or the `Tokens` of a conversation. A position is a JSON value, here the document's index in the
        reader's order. The readers of an epoch are disjoint and together cover the corpus.
        """
        order = _order(self._seed, epoch, len(self._corpus))[reader::readers]
        for position in range(start or 0, len(order)):
            yield position, self._corpus.document(int(order[position]))


Source = Shuffled | HubDocuments
"""Documents in a fixed order for each epoch."""


# All readers of an epoch use the same order. Two epochs are cached, since readers begin the next epoch at different steps.
@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, documents: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(documents)


def open_source(corpus_options: Corpus, *, seed: int = 0, chat: ChatFormat | None = None) -> Source:
    """Open the corpus that a job's settings name.

    | dataset                | dataset_path    | corpus                                                  |
    |------------------------|-----------------|---------------------------------------------------------|
    | "stdlib"               | None            | the sources of Python's standard library                |
    | "stdlib" (the default) | a path          | local files, whose extensions tell their format         |
    | "local"                | a path          | local files, whose extensions tell their format         |
    | one of `FORMATS`       | a path          | local files in this format, whatever their extensions   |
    | any other              | None, or a path | a data set of the Hugging Face hub, or a local copy     |

    A path is a file, a folder or a glob.

    Args:
        corpus_options: the settings.
        seed: the seed of the order of the documents.
        chat: reads rows as conversations; None: the documents are texts.

    Raises:
        DataError: the corpus does not exist, can't be read, or is empty.
    """
    dataset, path = corpus_options.dataset, corpus_options.dataset_path
    split = corpus_options.dataset_split
    is_local, shown = dataset == "local" or dataset in FORMATS, path or dataset
    if is_local and path is None:
        raise DataError(f"dataset = {dataset!r}: needs a dataset_path, which is a file, a folder or a glob")
    if is_hub_name(dataset):
        return HubDocuments(dataset, path, split, chat or TextColumn(corpus_options.text_column))
    if split not in SPLITS:
        raise DataError(
            f"dataset_split = {split!r}: a local corpus has the splits {', '.join(map(repr, SPLITS))}"
        )
    root, files, file_format = stdlib_root(), [], "text"
    if path is not None:
        root, files, file_format = find_files(path, dataset if dataset in FORMATS else None)
    if file_format == "text" and chat is not None:
        raise DataError(
            f"dataset = {shown!r}: holds texts, but chat.enable = true needs conversations; give .jsonl or .parquet files, "
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
        corpus = RowDocuments(root, files, file_format, split, TextColumn(corpus_options.text_column))
    if len(corpus) == 0:
        missing = chat.describe_exclusions() if chat else "no document"
        raise DataError(
            f"dataset = {shown!r}: holds {missing} for dataset_split = {split!r}, since every twentieth document, beginning "
            "with the first, is for validation; give more documents, or a separate dataset_path for validation"
        )
    return Shuffled(corpus, {"dataset": shown, "split": split}, seed)
