"""Rows of .jsonl and .parquet files as documents: converted once to Arrow, in the cache of the `datasets` library.

A `RowFormat` reads a row as a text (`column.py`) or a conversation (`chat.py`).

Rows of JSON are read here, a line at a time. The library's reader infers types from the first lines, turns what comes later
into them, refuses a row that lacks another row's field, and ends the process at a line that is `null`.
"""

import fcntl
import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from titanplans.errors import DataError
from titanplans.training.data.corpus.pieces import PIECE_BYTES, cut
from titanplans.training.data.split import check_split, in_split
from titanplans.training.job.reading import refusing

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset


class RowFormat(Protocol):
    """What rows are read as."""

    key: Any
    """A JSON value on which a cached row depends, next to the files."""
    identity: dict[str, Any]
    """What must be the same for a checkpoint to go on."""
    features: dict[str, str]
    """Arrow's columns and types: the first is a document's."""
    may_be_columns: bool
    """Whether a file of JSON may be one object of columns: one whose values are all lists."""

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        """The columns that are read of those that a file has. Raises DataError where one is missing."""
        ...

    def read(self, row: object, where: str) -> dict[str, Any]:
        """A row as Arrow holds it. Raises DataError, which names `where`, for one that can't be used."""
        ...

    def table(self, table: "pyarrow.Table | pyarrow.RecordBatch", file: str, before: int) -> "pyarrow.Table":
        """The rows of a table as Arrow holds them; `before` it there were so many rows in the file.

        Raises:
            DataError: a column is missing, or a row can't be used; names the file, and the row from 1 on.
        """
        ...

    def documents(self, record: dict[str, Any]) -> Iterator[Any]:
        """What Arrow holds of a row as documents."""
        ...


class Table:
    """The rows of some files, as their reader reads them; memory-mapped, so that any row can be read at once.

    Raises:
        DataError: a file can't be read, or a row can't be used; names the file, and of JSON the line.
    """

    def __init__(self, files: Sequence[Path], file_format: str, reader: RowFormat) -> None:
        states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        with quietly():
            rows = _arrow(states, file_format, reader)
        # As they lie in the files: Arrow's own scalars copy a row, which for each piece of a long one is slow.
        self._columns = {
            name: [_offsets_and_bytes(chunk) for chunk in rows.data.column(name).chunks if len(chunk)]
            for name in reader.features
        }
        self._document = next(iter(reader.features))
        chunks = self._columns[self._document]
        self.lengths = np.concatenate([np.diff(offsets) for offsets, _ in chunks] or [np.arange(0)])
        """Of each row's document, in bytes."""
        self._chunk_starts = np.cumsum([0, *(len(offsets) - 1 for offsets, _ in chunks)])

    def row(self, number: int, column: str | None = None) -> memoryview:
        """The bytes of a row, of its document if no other column is named."""
        which = int(np.searchsorted(self._chunk_starts, number, "right")) - 1
        offsets, texts = self._columns[column or self._document][which]
        i = number - int(self._chunk_starts[which])
        return texts[offsets[i] : offsets[i + 1]]


class RowFiles:
    """Texts; a long row is cut into several documents. Every twentieth row is for validation."""

    def __init__(self, table: Table, files: list[tuple[str, Path]], split: str) -> None:
        check_split(split)
        self.files, self.identity = files, {"piece_bytes": PIECE_BYTES}
        self._table = table
        numbers = np.flatnonzero(in_split(np.arange(len(table.lengths)), split))
        pieces = np.maximum(1, -(-table.lengths[numbers] // PIECE_BYTES))
        self._numbers = np.repeat(numbers, pieces)
        first = np.cumsum(pieces) - pieces
        self._starts = (np.arange(len(self._numbers)) - np.repeat(first, pieces)) * PIECE_BYTES

    def __len__(self) -> int:
        return len(self._numbers)

    def document(self, i: int) -> str:
        """Document `i`."""
        row, start = self._table.row(int(self._numbers[i])), int(self._starts[i])

        def read(place: int, length: int) -> memoryview:
            return row[place : place + length]

        begin, end = (cut(read, place, PIECE_BYTES, len(row)) for place in (start, start + PIECE_BYTES))
        return str(row[begin:end], "utf-8")


def _offsets_and_bytes(chunk: Any) -> tuple[np.ndarray, memoryview]:
    """Where each value of an Arrow array begins, and the last ends; and the bytes of all."""
    _, offsets, values = chunk.buffers()
    integers = np.frombuffer(offsets, np.int64 if "large" in str(chunk.type) else np.int32)
    return integers[chunk.offset : chunk.offset + len(chunk) + 1], memoryview(values or b"")


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


def _arrow(states: list[tuple[str, int, int]], file_format: str, reader: RowFormat) -> "Dataset":
    """The rows as Arrow: in the cache, named by its input; the first process to come makes it."""
    from datasets import Dataset, Features, Value, config
    from datasets.arrow_writer import ArrowWriter

    tables = {"json": _json, "parquet": _parquet}[file_format]
    name = hashlib.sha256(json.dumps([states, reader.key]).encode()).hexdigest()[:32]
    path = Path(config.HF_DATASETS_CACHE) / "titanplans" / f"{name}.arrow"
    path.parent.mkdir(parents=True, exist_ok=True)
    features = Features({column: Value(kind) for column, kind in reader.features.items()})
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_suffix(".partial")
            with ArrowWriter(path=str(partial), features=features) as writer:
                for file, _, _ in states:
                    with refusing(
                        f"{file} can't be read as {file_format}", "repair the file or leave it out"
                    ):
                        for table in tables(file, reader):
                            writer.write_table(table)
                writer.finalize()
            partial.replace(path)
    return Dataset.from_file(str(path))


def _parquet(file: str, reader: RowFormat) -> Iterator["pyarrow.Table"]:
    from pyarrow.parquet import ParquetFile

    rows = 0
    with ParquetFile(file) as parquet:
        columns = reader.columns(parquet.schema_arrow.names, file)
        for batch in parquet.iter_batches(1000, columns=columns):
            yield reader.table(batch, file, rows)
            rows += len(batch)


def _json(file: str, reader: RowFormat) -> Iterator["pyarrow.Table"]:
    """Tables of at most 1,000 rows, and of about 64 MB: Arrow's texts of one column of a table end at 2 GB."""
    batch, length = [], 0
    for record in records(file, reader):
        batch.append(record)
        length += len(next(iter(record.values())))
        if len(batch) == 1000 or length > 2**26:
            yield _table(batch, reader)
            batch, length = [], 0
    yield _table(batch, reader)


def _table(batch: list[dict[str, Any]], reader: RowFormat) -> "pyarrow.Table":
    import pyarrow

    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in reader.features.items()])
    return pyarrow.Table.from_pylist(batch, schema)


def records(file: str, reader: RowFormat) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON. Raises DataError for the first that can't be used, or read; names its line."""
    for where, row in _objects(Path(file), columns=reader.may_be_columns):
        yield reader.read(row, where)


def _objects(file: Path, *, columns: bool) -> Iterator[tuple[str, Any]]:
    """The rows of a file of JSON, each with its place: an object a line; or one array of objects or texts, or of columns."""
    with file.open("rb") as stream:
        first = True
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if first:
                    break  # one value over several lines, or no JSON at all
                raise DataError(
                    f"{file} can't be read as json (line {number}: {error}); repair the file or leave it out"
                ) from None
            if first and (isinstance(row, list) or (columns and isinstance(row, dict) and _is_columns(row))):
                break
            first = False
            yield f"{file}, line {number}", row
        else:
            return
    whole = json.loads(file.read_bytes())
    if columns and isinstance(whole, dict) and _is_columns(whole):
        rows = zip(*whole.values(), strict=True)
        whole = [dict(zip(whole, values, strict=True)) for values in rows]
    for number, row in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield f"{file}, row {number}", {"text": row} if isinstance(row, str) else row


def _is_columns(row: dict[str, Any]) -> bool:
    return bool(row) and all(isinstance(value, list) for value in row.values())
