"""`open_source`: open the corpus that `dataset`, `dataset_path` and `dataset_split` name, as documents in an order.

`local.py` and `rows.py` read files, `hub.py` data sets of the hub; `Shuffled` gives files an order for each epoch.
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
    """Documents with an index, in another order in each epoch, drawn from (seed, epoch).

    Attributes:
        identity: values that must be as in a checkpoint for a position to mean the same document.
        summary: for conversations, a line that says how many are read and how many are left out; else None.
        size: documents in an epoch; None if they are not counted.
        files: pairs of name and path; names are relative to the corpus. Empty if it is not on this machine.
    """

    def __init__(self, corpus: TextFiles | RowDocuments, identity: dict[str, Any], seed: int) -> None:
        self._corpus, self._seed = corpus, seed
        self.files, self.size = corpus.files, len(corpus)
        self.summary = corpus.summary if isinstance(corpus, Conversations) else None
        self.identity = identity | corpus.identity | {"seed": seed}

    def choose_readers(self, counts: Sequence[int]) -> int:
        """Return the first of `counts`, numbers of readers, into which the corpus can be divided; 1 if there is none.

        With 1, ranks and workers use the same reader in turn, as there are fewer documents than ranks and workers.
        """
        return next((count for count in counts if count <= len(self._corpus)), 1)

    def documents(self, epoch: int, reader: int, readers: int, start: Any) -> Iterator[tuple[int, Any]]:
        """Yield the documents of `epoch` that belong to `reader` of `readers`, from `start` on, each with its position.

        A document is a text, or the `Tokens` of a conversation. A position is a JSON value, here the document's index in the
        reader's order; passed as `start`, it begins with that document. The readers of an epoch are disjoint and together
        cover the corpus.
        """
        order = _order(self._seed, epoch, len(self._corpus))[reader::readers]
        for position in range(start or 0, len(order)):
            yield position, self._corpus.document(int(order[position]))


Source = Shuffled | HubDocuments
"""Documents in a fixed order for each epoch."""


# All readers of an epoch use the same order. Two entries, as readers begin the next epoch at different steps.
@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, documents: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(documents)


def open_source(corpus_options: Corpus, *, seed: int = 0, chat: ChatFormat | None = None) -> Source:
    """Open the corpus that a job's settings name.

    | dataset                | dataset_path    | corpus                                                  |
    |------------------------|-----------------|---------------------------------------------------------|
    | "stdlib"               | None            | the sources of Python's standard library                |
    | "stdlib" (the default) | a path          | local files, by their extensions                        |
    | "local"                | a path          | local files, by their extensions                        |
    | one of `FORMATS`       | a path          | local files in this format, whatever their extensions   |
    | any other              | None, or a path | a data set of the Hugging Face hub, or a local copy     |

    A path is a file, a folder or a glob.

    Args:
        corpus_options: the settings.
        seed: of the order of the documents.
        chat: reads rows as conversations; None: read texts.

    Raises:
        DataError: the corpus does not exist, can't be read, or is empty.
    """
    dataset, path = corpus_options.dataset, corpus_options.dataset_path
    split = corpus_options.dataset_split
    is_local, shown = dataset == "local" or dataset in FORMATS, path or dataset
    if is_local and path is None:
        raise DataError(f"dataset = {dataset!r}: needs a dataset_path, which is a file, a folder or a glob")
    if not is_local and dataset != "stdlib":
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
        corpus = RowDocuments(root, files, file_format, split, TextColumn(corpus_options.text_column))
    if len(corpus) == 0:
        missing = chat.describe_exclusions() if chat else "no document"
        raise DataError(
            f"dataset = {shown!r}: holds {missing} for dataset_split = {split!r}; every twentieth, from the first on, is "
            "for validation: give more documents, or a separate dataset_path for validation"
        )
    return Shuffled(corpus, {"dataset": shown, "split": split}, seed)
