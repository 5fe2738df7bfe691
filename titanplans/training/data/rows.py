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
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from titanplans.errors import DataError
from titanplans.training.data.pieces import PIECE_BYTES, cut
from titanplans.training.data.split import check_split, in_split
from titanplans.training.reading import refusing

if TYPE_CHECKING:
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
        which = str(files[0]) if len(files) == 1 else f"one of the {len(files)} files beside {files[0]}"
        with (
            quietly(),
            refusing(f"{which} can't be read as {file_format}", "repair the file or leave it out"),
        ):
            rows = _json(states, text_column) if file_format == "json" else _parquet(files, text_column)
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
        self._where = which

    def __len__(self) -> int:
        return len(self._numbers)

    def text(self, i: int) -> str:
        """Document `i`. Raises DataError if it is not UTF-8."""
        number, start = int(self._numbers[i]), int(self._starts[i])
        row = self._row(number)

        def read(place: int, length: int) -> memoryview:
            return row[place : place + length]

        begin, end = (cut(read, place, PIECE_BYTES, len(row)) for place in (start, start + PIECE_BYTES))
        try:
            return str(row[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._where}: row {number} is not UTF-8 ({error.reason} at its byte {begin + error.start}); "
                "repair the file or leave it out"
            ) from error

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


def _parquet(files: Sequence[Path], text_column: str) -> "Dataset":
    from datasets import Value, load_dataset

    rows = load_dataset("parquet", data_files=[str(file) for file in files], split="train")
    where = str(files[0])
    check_column(rows.column_names, text_column, where)
    rows = cast("Dataset", rows.select_columns([text_column]))
    # Now rather than at the hour when training reaches such a row. Reads metadata only.
    feature = rows.features[text_column]
    kind = feature.dtype if isinstance(feature, Value) else type(feature).__name__
    if kind not in ("string", "large_string"):
        raise _no_text(text_column, where, f"values of type {kind}")
    if empty := rows.data.column(text_column).null_count:
        raise _no_text(text_column, where, f"{empty} of {len(rows)} rows without a value")
    return rows


def _json(states: list[tuple[str, int, int]], text_column: str) -> "Dataset":
    """The rows as Arrow, in a file of the cache that is named by what was read; the first process to come makes it."""
    from datasets import Dataset, Features, Value, config
    from datasets.arrow_writer import ArrowWriter

    name = hashlib.sha256(json.dumps([states, text_column]).encode()).hexdigest()[:32]
    path = Path(config.HF_DATASETS_CACHE) / "titanplans" / f"{name}.arrow"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_suffix(".partial")
            texts = _texts([name for name, _, _ in states], text_column)
            with ArrowWriter(path=str(partial), features=Features({text_column: Value("string")})) as writer:
                for batch in _batches(texts):
                    writer.write_batch({text_column: batch})
                writer.finalize()
            partial.replace(path)
    return Dataset.from_file(str(path))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of at most 1,000 texts, and of about 64 MB: Arrow's texts of one column of a batch end at 2 GB."""
    batch, length = [], 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if len(batch) == 1000 or length > 2**26:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _texts(files: list[str], text_column: str) -> Iterator[str]:
    for name in files:
        for where, row in _objects(Path(name)):
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
    for number, row in enumerate(whole if isinstance(whole, list) else [whole]):
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
