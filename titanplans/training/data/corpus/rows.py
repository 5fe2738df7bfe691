"""`RowDocuments`: rows of .jsonl and .parquet files as documents. The rows are converted to Arrow in the `datasets` cache.

A `RowFormat` reads a row as a text (`column.py`) or a conversation (`chat.py`).
"""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titanplans.training.data.chat.chat import ChatFormat, Tokens
from titanplans.training.data.corpus.column import TextColumn
from titanplans.training.data.corpus.local import in_split
from titanplans.training.data.data_errors import as_data_error

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

_ROW = "row"
_LAYOUT = 3
"""Version of the cached rows. Raise it when their form changes, so that caches of earlier versions are not used."""


RowFormat = TextColumn | ChatFormat
"""Reads a row as a document."""


class RowDocuments:
    """Documents that are rows of files. A row is read from the cache when it is needed; every 20th is for validation.

    Args:
        root: the folder that names of files are relative to.
        files: the files.
        file_format: "json" or "parquet".
        split: "train", "validation" or "all".
        reader: converts rows to documents.

    Raises:
        DataError: a file can't be read, or a row can't be used; the message names the file, and the line or row.
    """

    def __init__(self, root: Path, files: Sequence[Path], file_format: str, split: str, reader: RowFormat):
        self.files = [(file.relative_to(root).as_posix(), file) for file in files]
        self.identity = dict(reader.identity)
        self._reader = reader
        stored = _cached_dataset(files, file_format, reader).data
        self._columns = {name: stored.column(name) for name in reader.features}
        self._rows = np.flatnonzero(in_split(stored.column(_ROW).to_numpy(), split))

    def __len__(self) -> int:
        return len(self._rows)

    def document(self, i: int) -> Any:
        """Return document `i` of the split."""
        return self._reader.document(self._record(int(self._rows[i])))

    def _record(self, row: int) -> dict[str, Any]:
        return {name: column[row].as_py() for name, column in self._columns.items()}


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the logger of the `datasets` library in the body, and its progress bars unless stderr is a terminal."""
    import datasets

    datasets_logger = logging.getLogger("datasets")
    level, has_bars = datasets_logger.level, not datasets.are_progress_bars_disabled()
    datasets_logger.setLevel(logging.CRITICAL)
    if has_bars and not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets_logger.setLevel(level)
        if has_bars:
            datasets.enable_progress_bars()


def cache_folder() -> Path:
    """Return the folder of converted corpora, and of their locks, in the library's cache."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "titanplans"


def _cached_dataset(files: Sequence[Path], file_format: str, reader: RowFormat) -> "Dataset":
    """Return the converted documents from the cache. The first process converts them under a lock, and other processes
    wait."""
    from datasets import Dataset, Features, Value

    states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    features = Features({name: Value(kind) for name, kind in (reader.features | {_ROW: "int64"}).items()})
    with (
        quiet_datasets(),
        as_data_error("a data set can't be kept in the cache", "set HF_DATASETS_CACHE to another folder"),
    ):
        return Dataset.from_generator(
            partial(_fragments, files, file_format, reader),
            cache_dir=str(cache_folder()),
            features=features,
            fingerprint=hashlib.sha256(json.dumps([_LAYOUT, states, reader.key]).encode()).hexdigest()[:32],
        )


def _fragments(files: Sequence[Path], file_format: str, reader: RowFormat) -> Iterator[dict[str, Any]]:
    """Yield the documents of all files, each with the index of its row over all files."""
    read_rows, row = {"json": read_json, "parquet": _read_parquet}[file_format], 0
    for file in files:
        with as_data_error(f"{file} can't be read as {file_format}"):
            for record in read_rows(str(file.absolute()), reader):
                yield from (fragment | {_ROW: row} for fragment in reader.fragments(record))
                row += 1


def _read_parquet(file: str, reader: RowFormat) -> Iterator[dict[str, Any]]:
    from pyarrow.parquet import ParquetFile

    rows = 0
    with ParquetFile(file) as parquet:
        columns = reader.columns(parquet.schema_arrow.names, file)
        for batch in parquet.iter_batches(1000, columns=columns):
            yield from read_table(batch, file, rows, reader)
            rows += len(batch)


def read_table(
    table: "pyarrow.Table | pyarrow.RecordBatch", file: str, before: int, reader: RowFormat
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table in the form in which they are stored in Arrow.

    Args:
        table: some rows of a file.
        file: the file's name, for messages.
        before: the number of the file's rows before the table.
        reader: converts the rows.

    Raises:
        DataError: a column is missing, or a row can't be used; names the file and the row, counted from 1.
    """
    columns = {name: table.column(name) for name in reader.columns(table.schema.names, file)}
    for index in range(len(table)):
        where = f"{file}, row {before + index + 1}"
        with as_data_error(f"{where} can't be read"):
            row = {name: _cell_value(column[index]) for name, column in columns.items()}
        yield reader.read(row, where)


def _cell_value(scalar: Any) -> Any:
    """Return the value of a cell. Arrow gives each object the keys of all rows' objects; null values are removed."""

    def without_none(value: Any) -> Any:
        if isinstance(value, list):
            return [without_none(item) for item in value]
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        return value

    value = scalar.as_py()
    if value is not None and "json" in str(scalar.type):  # the column has values of several types
        value = json.loads(value)
    return without_none(value)


def read_json(file: str, reader: RowFormat) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON file, which has one value per line or holds one array.

    Raises:
        DataError: a row can't be used; names its line.
    """
    # The `datasets` library (4.7) is not used: it converts texts that look like dates, converts numbers to texts if an
    # earlier row has a text, and refuses a row that lacks a field of another row.
    with open(file, "rb") as lines:
        if next((line for line in lines if line.strip()), b"").lstrip().startswith(b"["):
            lines.seek(0)
            with as_data_error(f"{file} can't be read as json"):
                rows = json.load(lines)
            for number, row in enumerate(rows, 1):
                yield reader.read({"text": row} if isinstance(row, str) else row, f"{file}, row {number}")
            return
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            if line.strip():
                with as_data_error(f"{file}, line {number} can't be read as json"):
                    row = json.loads(line)
                yield reader.read(row, f"{file}, line {number}")


class Conversations(RowDocuments):
    """Documents that are conversations, one per row. The constructor decides which rows are left out.

    Raises:
        DataError: a conversation is too long, with truncation = "error".
    """

    def __init__(self, root: Path, files: Sequence[Path], file_format: str, split: str, chat: ChatFormat):
        # pyarrow defines the functions of this module when it is imported.
        from pyarrow.compute import binary_length  # pyrefly: ignore[missing-module-attribute]

        super().__init__(root, files, file_format, split, chat)
        self._chat, self._split = chat, split
        self._lengths = binary_length(self._columns["conversation"]).to_numpy() // 4
        lengths = self._lengths[self._rows]
        self._empty = self._rows[lengths == 0]
        self._long = self._rows[lengths > chat.seq_len + 1]
        dropped = [row for row in map(int, self._long) if self._truncated(row) is None]
        self._row_count, self._dropped_count = len(self._rows), len(dropped)
        self._rows = self._rows[(lengths > 0) & ~np.isin(self._rows, dropped)]
        # The order of an epoch depends on the number of conversations.
        self.identity |= {"conversations": len(self._rows)}

    def document(self, i: int) -> Tokens:
        """Return conversation `i` of the split."""
        tokens = self._truncated(int(self._rows[i]))
        assert tokens is not None
        return tokens

    @property
    def summary(self) -> str:
        """A line for the log: how many conversations are used, left out and truncated, and the first of each kind."""
        phrases = [
            f"{len(self):,} of {self._row_count:,} conversations are used (dataset_split = {self._split!r})"
        ]
        if len(self._empty):
            phrases.append(
                f"left out because none of their tokens count: {len(self._empty):,}{self._describe_first(self._empty)}"
            )
        if truncated := len(self._long) - self._dropped_count:
            phrases.append(f"truncated to seq_len = {self._chat.seq_len}: {truncated:,}")
        if self._dropped_count:
            phrases.append(f"left out because they are too long: {self._dropped_count:,}")
        if len(self._long):
            phrases[-1] += self._describe_first(self._long)
        return "; ".join(phrases)

    def _truncated(self, row: int) -> Tokens | None:
        record = self._record(row)
        return self._chat.fit(Tokens.from_bytes(record["conversation"]), record["where"])

    def _describe_first(self, rows: np.ndarray) -> str:
        tokens = int(self._lengths[rows[0]])
        where = self._record(int(rows[0]))["where"]
        return f" (the first: {where}{f', {tokens:,} tokens' if tokens else ''})"
