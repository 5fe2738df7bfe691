"""Rows of .jsonl and .parquet files as documents: converted once to Arrow, in the cache of the `datasets` library.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from titanplans.errors import DataError
from titanplans.training.data.pieces import PIECE_BYTES, cut
from titanplans.training.data.split import check_split, in_split
from titanplans.training.reading import refusing

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset


class Rows:
    """Documents that are rows of .jsonl or .parquet files, in the column `text_column`; a long row is cut into several.

    The files are memory-mapped from the cache, so that any row can be read at once. Every twentieth row is for validation.

    Raises:
        DataError: a file can't be read, or a row has no text in that column; names the file, and of JSON the line.
    """

    piece_bytes = PIECE_BYTES

    def __init__(
        self, root: Path, files: Sequence[Path], file_format: str, split: str, text_column: str
    ) -> None:
        check_split(split)
        self.files = [(file.relative_to(root).as_posix(), file) for file in files]
        states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        with quietly():
            rows = _arrow(states, file_format, text_column)
        # As they lie in the files: Arrow's own scalars copy a row, which for each piece of a long one is slow.
        self._chunks = [
            _offsets_and_bytes(chunk) for chunk in rows.data.column(text_column).chunks if len(chunk)
        ]
        lengths = np.concatenate([np.diff(offsets) for offsets, _ in self._chunks] or [np.arange(0)])
        self._chunk_starts = np.cumsum([0, *(len(offsets) - 1 for offsets, _ in self._chunks)])
        numbers = np.flatnonzero(in_split(np.arange(len(lengths)), split))
        pieces = np.maximum(1, -(-lengths[numbers] // PIECE_BYTES))
        self._numbers = np.repeat(numbers, pieces)
        first = np.cumsum(pieces) - pieces
        self._starts = (np.arange(len(self._numbers)) - np.repeat(first, pieces)) * PIECE_BYTES

    def __len__(self) -> int:
        return len(self._numbers)

    def text(self, i: int) -> str:
        """Document `i`."""
        number, start = int(self._numbers[i]), int(self._starts[i])
        row = self._row(number)

        def read(place: int, length: int) -> memoryview:
            return row[place : place + length]

        begin, end = (cut(read, place, PIECE_BYTES, len(row)) for place in (start, start + PIECE_BYTES))
        return str(row[begin:end], "utf-8")

    def _row(self, number: int) -> memoryview:
        which = int(np.searchsorted(self._chunk_starts, number, "right")) - 1
        offsets, texts = self._chunks[which]
        i = number - int(self._chunk_starts[which])
        return texts[offsets[i] : offsets[i + 1]]


def _offsets_and_bytes(chunk: Any) -> tuple[np.ndarray, memoryview]:
    """Where each text of an Arrow array begins, and the last ends; and the bytes of all."""
    _, offsets, texts = chunk.buffers()
    integers = np.frombuffer(offsets, np.int64 if "large" in str(chunk.type) else np.int32)
    return integers[chunk.offset : chunk.offset + len(chunk) + 1], memoryview(texts or b"")


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


def _arrow(states: list[tuple[str, int, int]], file_format: str, text_column: str) -> "Dataset":
    """The rows as Arrow, in a file of the cache that is named by what was read; the first process to come makes it."""
    from datasets import Dataset, Features, Value, config
    from datasets.arrow_writer import ArrowWriter

    tables = {"json": _json, "parquet": _parquet}[file_format]
    name = hashlib.sha256(json.dumps([states, text_column]).encode()).hexdigest()[:32]
    path = Path(config.HF_DATASETS_CACHE) / "titanplans" / f"{name}.arrow"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_suffix(".partial")
            with ArrowWriter(path=str(partial), features=Features({text_column: Value("string")})) as writer:
                for file, _, _ in states:
                    with refusing(
                        f"{file} can't be read as {file_format}", "repair the file or leave it out"
                    ):
                        for table in tables(file, text_column):
                            writer.write_table(table)
                writer.finalize()
            partial.replace(path)
    return Dataset.from_file(str(path))


def _parquet(file: str, text_column: str) -> Iterator["pyarrow.Table"]:
    from pyarrow.parquet import ParquetFile

    rows = 0
    with ParquetFile(file) as parquet:
        check_column(parquet.schema_arrow.names, text_column, file)
        for batch in parquet.iter_batches(1000, columns=[text_column]):
            yield text_table(batch, text_column, file, rows)
            rows += len(batch)


def _json(file: str, text_column: str) -> Iterator["pyarrow.Table"]:
    """Tables of at most 1,000 texts, and of about 64 MB: Arrow's texts of one column of a table end at 2 GB."""
    import pyarrow

    batch, length = [], 0
    for text in texts(file, text_column):
        batch.append(text)
        length += len(text)
        if len(batch) == 1000 or length > 2**26:
            yield pyarrow.table({text_column: batch})
            batch, length = [], 0
    yield pyarrow.table({text_column: pyarrow.array(batch, pyarrow.string())})


def text_table(
    table: "pyarrow.Table | pyarrow.RecordBatch", text_column: str, file: str, before: int
) -> "pyarrow.Table":
    """The texts of a table alone; `before` it there were so many rows in the file.

    Raises:
        DataError: there is no such column, or a row that is no text; names the file, and the row from 1 on.
    """
    import pyarrow

    check_column(table.schema.names, text_column, file)
    column = table.column(text_column)
    if column.null_count or str(column.type) not in ("string", "large_string") or not _is_utf8(column):
        column = [
            _as_text(value, text_column, f"{file}, row {number}")
            for number, value in enumerate(column, before + 1)
        ]
    return pyarrow.table({text_column: column})


def _is_utf8(column: Any) -> bool:
    import pyarrow

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        return False
    return True


def _as_text(scalar: Any, text_column: str, where: str) -> str:
    try:
        value = scalar.as_py()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 ({error.reason} at its byte {error.start}); repair the file or leave it out"
        ) from error
    if "json" in str(scalar.type):  # of a column with rows of several types
        value = json.loads(value)
    return as_text(value, text_column, where)


def texts(file: str, text_column: str) -> Iterator[str]:
    """The rows of a file of JSON. Raises DataError for the first that has no text, or can't be read; names its line."""
    for where, row in _objects(Path(file)):
        if not isinstance(row, dict):
            raise DataError(
                f"{where} holds a value of type {type(row).__name__} where there should be an object with "
                f"{text_column!r}; repair the file or leave it out"
            )
        if text_column not in row:
            check_column(list(row), text_column, where)
        yield as_text(row[text_column], text_column, where)


def _objects(file: Path) -> Iterator[tuple[str, Any]]:
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
            if first and (isinstance(row, list) or (isinstance(row, dict) and _is_columns(row))):
                break
            first = False
            yield f"{file}, line {number}", row
        else:
            return
    whole = json.loads(file.read_bytes())
    if isinstance(whole, dict) and _is_columns(whole):
        columns = zip(*whole.values(), strict=True)
        whole = [dict(zip(whole, values, strict=True)) for values in columns]
    for number, row in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield f"{file}, row {number}", {"text": row} if isinstance(row, str) else row


def _is_columns(row: dict[str, Any]) -> bool:
    return bool(row) and all(isinstance(value, list) for value in row.values())


def check_column(columns: Sequence[str], text_column: str, where: str) -> None:
    """Raises DataError unless `text_column` is one of `columns`."""
    if text_column not in columns:
        there = ", ".join(map(repr, sorted(columns)))
        raise DataError(
            f"text_column = {text_column!r}: {where} has the columns {there}; name the one with the text"
        )


def as_text(value: object, text_column: str, where: str) -> str:
    """`value` if it is a text; else raises DataError."""
    if not isinstance(value, str):
        found = "no value" if value is None else f"a value of type {type(value).__name__}"
        raise _no_text(text_column, where, found)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _no_text(text_column, where, "half of a character (a lone surrogate)") from None
    return value


def _no_text(text_column: str, where: str, found: str) -> DataError:
    return DataError(
        f"text_column = {text_column!r}: {where} holds {found} where there should be texts; "
        f"name a column of texts, or leave such rows out"
    )
