"""Rows of .jsonl and .parquet files as documents: kept by the `datasets` library, as Arrow in its cache.

A `RowFormat` reads a row as a text (`column.py`) or a conversation (`chat.py`).

Rows of JSON are read here, a line at a time. The library's reader (4.7) makes dates of texts that look so, and texts of
numbers where others came before; and it refuses a row that lacks another row's field.
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
from titanplans.training.data.reading import refusing

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

_ROW = "row"
_LAYOUT = 3
"""Of what is kept of a file: raise it with a change, so that no cache is read that another version wrote."""


RowFormat = TextColumn | ChatFormat
"""What rows are read as."""


class RowDocuments:
    """Documents that are rows of files, each read when it is asked for. Every twentieth row is for validation.

    Raises:
        DataError: a file can't be read, or a row can't be used; names the file, and the line or row.
    """

    def __init__(self, root: Path, files: Sequence[Path], file_format: str, split: str, reader: RowFormat):
        self.files = [(file.relative_to(root).as_posix(), file) for file in files]
        self.identity = dict(reader.identity)
        self._reader = reader
        stored = _stored(files, file_format, reader).data
        self._columns = {name: stored.column(name) for name in reader.features}
        self._numbers = np.flatnonzero(in_split(stored.column(_ROW).to_numpy(), split))

    def __len__(self) -> int:
        return len(self._numbers)

    def document(self, i: int) -> Any:
        """Document `i`."""
        return self._reader.document(self._record(int(self._numbers[i])))

    def _record(self, number: int) -> dict[str, Any]:
        return {name: column[number].as_py() for name, column in self._columns.items()}


@contextmanager
def quietly() -> Iterator[None]:
    """Keep the words of the `datasets` library off the screen, and its bars where nobody watches them."""
    import datasets

    datasets_logger = logging.getLogger("datasets")
    level, bars = datasets_logger.level, not datasets.are_progress_bars_disabled()
    datasets_logger.setLevel(logging.CRITICAL)
    if bars and not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets_logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def copies() -> Path:
    """Return the folder of the copies of corpora, with their locks, in the library's cache."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "titanplans"


def _stored(files: Sequence[Path], file_format: str, reader: RowFormat) -> "Dataset":
    """The documents in the library's cache, named by their files; the first process to come makes it."""
    from datasets import Dataset, Features, Value

    states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    features = Features({name: Value(kind) for name, kind in (reader.features | {_ROW: "int64"}).items()})
    with (
        quietly(),
        refusing("a data set can't be kept in the cache", "set HF_DATASETS_CACHE to another folder"),
    ):
        return Dataset.from_generator(
            partial(_fragments, files, file_format, reader),
            cache_dir=str(copies()),
            features=features,
            fingerprint=hashlib.sha256(json.dumps([_LAYOUT, states, reader.key]).encode()).hexdigest()[:32],
        )


def _fragments(files: Sequence[Path], file_format: str, reader: RowFormat) -> Iterator[dict[str, Any]]:
    read, number = {"json": records, "parquet": _parquet}[file_format], 0
    for file in files:
        with refusing(f"{file} can't be read as {file_format}"):
            for record in read(str(file.absolute()), reader):
                yield from (fragment | {_ROW: number} for fragment in reader.fragments(record))
                number += 1


def _parquet(file: str, reader: RowFormat) -> Iterator[dict[str, Any]]:
    from pyarrow.parquet import ParquetFile

    rows = 0
    with ParquetFile(file) as parquet:
        columns = reader.columns(parquet.schema_arrow.names, file)
        for batch in parquet.iter_batches(1000, columns=columns):
            yield from of_table(batch, file, rows, reader)
            rows += len(batch)


def of_table(
    table: "pyarrow.Table | pyarrow.RecordBatch", file: str, before: int, reader: RowFormat
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table as Arrow holds them; the file has `before` rows in front of it.

    Raises:
        DataError: a column is missing, or a row can't be used; names the file, and the row from 1 on.
    """
    columns = {name: table.column(name) for name in reader.columns(table.schema.names, file)}
    for number in range(len(table)):
        where = f"{file}, row {before + number + 1}"
        with refusing(f"{where} can't be read"):
            row = {name: _value(column[number]) for name, column in columns.items()}
        yield reader.read(row, where)


def _value(scalar: Any) -> Any:
    """What a cell holds: Arrow gives an object every key of any other row's object."""

    def without_none(value: Any) -> Any:
        if isinstance(value, list):
            return [without_none(item) for item in value]
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        return value

    value = scalar.as_py()
    if value is not None and "json" in str(scalar.type):  # of a column with rows of several types
        value = json.loads(value)
    return without_none(value)


def records(file: str, reader: RowFormat) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON, a value a line, or one array. Raises DataError for the first that can't be used."""
    with open(file, "rb") as stream:
        if next((line for line in stream if line.strip()), b"").lstrip().startswith(b"["):
            stream.seek(0)
            with refusing(f"{file} can't be read as json"):
                rows = json.load(stream)
            for number, row in enumerate(rows, 1):
                yield reader.read({"text": row} if isinstance(row, str) else row, f"{file}, row {number}")
            return
        stream.seek(0)
        for number, line in enumerate(stream, 1):
            if line.strip():
                with refusing(f"{file}, line {number} can't be read as json"):
                    row = json.loads(line)
                yield reader.read(row, f"{file}, line {number}")


class Conversations(RowDocuments):
    """Documents that are conversations, each a row. All that is left out is known before training begins.

    Raises:
        DataError: one is too long, under truncation = "error".
    """

    def __init__(self, root: Path, files: Sequence[Path], file_format: str, split: str, chat: ChatFormat):
        from pyarrow.compute import (
            binary_length,  # pyrefly: ignore[missing-module-attribute]  made as it is imported
        )

        super().__init__(root, files, file_format, split, chat)
        self._chat, self._split = chat, split
        self._lengths = binary_length(self._columns["conversation"]).to_numpy() // 4
        lengths = self._lengths[self._numbers]
        self._silent = self._numbers[lengths == 0]
        self._long = self._numbers[lengths > chat.seq_len + 1]
        gone = [row for row in map(int, self._long) if self._fitted(row) is None]
        self._rows, self._dropped = len(self._numbers), len(gone)
        self._numbers = self._numbers[(lengths > 0) & ~np.isin(self._numbers, gone)]
        # The order of an epoch depends on their number.
        self.identity |= {"conversations": len(self._numbers)}

    def document(self, i: int) -> Tokens:
        """Conversation `i`."""
        tokens = self._fitted(int(self._numbers[i]))
        assert tokens is not None
        return tokens

    @property
    def summary(self) -> str:
        """Return in words how many conversations there are, and how many are left out or cut, with the first of each."""
        said = [f"{len(self):,} of {self._rows:,} conversations are read (dataset_split = {self._split!r})"]
        if len(self._silent):
            said.append(
                f"left out, as nothing in them counts: {len(self._silent):,}{self._first(self._silent)}"
            )
        if kept := len(self._long) - self._dropped:
            said.append(f"cut to seq_len = {self._chat.seq_len}: {kept:,}")
        if self._dropped:
            said.append(f"left out for their length: {self._dropped:,}")
        if len(self._long):
            said[-1] += self._first(self._long)
        return "; ".join(said)

    def _fitted(self, row: int) -> Tokens | None:
        kept = self._record(row)
        return self._chat.fit(Tokens.from_bytes(kept["conversation"]), kept["where"])

    def _first(self, rows: np.ndarray) -> str:
        tokens = int(self._lengths[rows[0]])
        where = self._record(int(rows[0]))["where"]
        return f" (the first: {where}{f', {tokens:,} tokens' if tokens else ''})"
