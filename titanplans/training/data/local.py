"""Local corpora: text files cut into documents, and the rows of .jsonl and .parquet files.

Both are indexed (a number of documents, each read when it is asked for) and split by the rules of
`split.py`. Their order over an epoch is decided in `sources.py`.
"""

import glob
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np

from titanplans.errors import DataError
from titanplans.training.data.split import VALIDATION_EVERY, check_split, in_split, split_names

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {"text": (".txt", ".md", ".py"), "json": (".jsonl", ".json"), "parquet": (".parquet",)}
"""Format -> the extensions of its files. The names are those of the `datasets` library's builders."""

PIECE_BYTES = 64 * 1024
"""A text file is read as pieces of about this size, each of which is a document, cut at a line end."""


def find_files(path: str, wanted: str | None = None) -> tuple[Path, list[Path], str]:
    """The files that `path` (a file, a folder or a glob; `**` descends) stands for.

    Args:
        path: the job's `dataset_path`.
        wanted: a key of FORMATS, or None to go by the extensions.

    Returns:
        The folder that relative names start from, the files sorted by name, their format.

    Raises:
        DataError: nothing there, nothing of a known format, or more than one format.
    """
    shown = f"dataset_path = {path!r}"
    given = Path(path).expanduser()
    if given.is_file():
        root, found = given.parent, [given]
    elif given.is_dir():
        root, found = given, [file for file in given.rglob("*") if not _hidden(file.relative_to(given))]
    elif glob.has_magic(path):
        root = Path(*_parts_before_magic(given))
        found = [Path(file) for file in glob.glob(str(given), recursive=True)]
    else:
        raise DataError(
            f"{shown}: no such file or folder; give a file, a folder or a glob such as 'corpus/*.jsonl'"
        )
    found = sorted(file for file in found if file.is_file() and file.stat().st_size > 0)
    if not found:
        raise DataError(
            f"{shown}: there is no file with anything in it; give a file, a folder or a glob such as 'corpus/*.jsonl'"
        )
    if wanted is not None and not given.is_dir():
        return root, found, wanted
    formats = {wanted: FORMATS[wanted]} if wanted is not None else FORMATS
    by_format = {
        name: [file for file in found if file.suffix.lower() in extensions]
        for name, extensions in formats.items()
    }
    by_format = {name: files for name, files in by_format.items() if files}
    supported = ", ".join(extension for extensions in formats.values() for extension in extensions)
    if not by_format:
        there = ", ".join(sorted({file.suffix or file.name for file in found})[:8])
        raise DataError(f"{shown}: holds {there}; the extensions read are {supported}")
    if len(by_format) > 1:
        there = " and ".join(f"{len(files)} {name}" for name, files in by_format.items())
        raise DataError(
            f"{shown}: holds {there} files; name one format with dataset = 'text', 'json' or 'parquet'"
        )
    ((name, files),) = by_format.items()
    return root, files, name


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _parts_before_magic(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return parts


class TextFiles:
    """Documents cut from UTF-8 text files, about `piece_bytes` each, at line ends.

    Opening asks for the files' sizes and reads none of them. A piece holds the lines that begin in its
    range of bytes (a line longer than that is cut), so the pieces of a file, put together, are the
    file. Twenty files or more are split by file; of fewer, every twentieth piece is for validation.
    """

    def __init__(self, root: Path, files: Sequence[Path], split: str, piece_bytes: int = PIECE_BYTES) -> None:
        check_split(split)
        self._piece_bytes = piece_bytes
        names = [file.relative_to(root).as_posix() for file in files]
        by_file = len(files) >= VALIDATION_EVERY
        kept = split_names(names, split) if by_file else range(len(files))
        self._pieces: list[tuple[Path, int]] = []
        digest = hashlib.sha256(f"{piece_bytes}\0".encode())
        for i in kept:
            size = files[i].stat().st_size
            digest.update(f"{names[i]}\0{size}\0".encode())
            self._pieces += [(files[i], start) for start in range(0, size, piece_bytes)]
        if not by_file:
            kept_pieces = in_split(np.arange(len(self._pieces)), split)
            self._pieces = list(itertools.compress(self._pieces, kept_pieces))
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._pieces)

    def text(self, i: int) -> str:
        """Document `i`. Raises DataError if it is not UTF-8."""
        file, start = self._pieces[i]
        with file.open("rb") as stream:
            begin, end = (
                _cut_after(stream, place, self._piece_bytes) for place in (start, start + self._piece_bytes)
            )
            stream.seek(begin)
            raw = stream.read(end - begin)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}: byte {begin + error.start} is not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from error


def _cut_after(stream: BinaryIO, place: int, piece_bytes: int) -> int:
    """Where the first line that begins at byte `place` or later does; at most a piece away from `place`.

    Within a longer line it is the first character from `place` on; beyond the last line, the end of the
    file or later.
    """
    if place == 0:
        return 0
    stream.seek(place - 1)
    seen = stream.readline(piece_bytes + 1)
    if seen.endswith(b"\n") or len(seen) <= piece_bytes:
        return place - 1 + len(seen)
    continued = next((i for i, byte in enumerate(seen[1:4]) if byte & 0xC0 != 0x80), 3)
    return place + continued


class Rows:
    """Documents that are rows of .jsonl or .parquet files, in the column `text_column`.

    The files are converted once to Arrow in the cache of the `datasets` library and memory-mapped from
    there, so that any row can be read at once. Every twentieth row is for validation.
    """

    def __init__(self, files: Sequence[Path], file_format: str, split: str, text_column: str) -> None:
        from datasets import load_dataset

        check_split(split)
        with _naming_the_files(files, file_format):
            rows = load_dataset(file_format, data_files=[str(file) for file in files], split="train")
        check_column(rows.column_names, text_column, str(files[0]))
        self._rows = cast("Dataset", rows.select_columns([text_column]))
        self._check_texts(text_column, str(files[0]))
        self._numbers = np.flatnonzero(in_split(np.arange(len(rows)), split))
        self._text_column = text_column
        names = [f"{file.name} {file.stat().st_size}" for file in files]
        self.fingerprint = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]

    def _check_texts(self, text_column: str, where: str) -> None:
        """Now rather than at the hour when training reaches such a row. Reads metadata only."""
        dtype = self._rows.features[text_column].dtype
        if dtype not in ("string", "large_string"):
            raise _no_text(text_column, where, f"values of type {dtype}")
        empty = self._rows.data.column(text_column).null_count
        if empty:
            raise _no_text(text_column, where, f"{empty} of {len(self._rows)} rows without a value")

    def __len__(self) -> int:
        return len(self._numbers)

    def text(self, i: int) -> str:
        """Document `i`. Raises DataError if it is not a text."""
        number = int(self._numbers[i])
        return as_text(self._rows[number][self._text_column], self._text_column, f"row {number}")


@contextmanager
def _naming_the_files(files: Sequence[Path], file_format: str) -> Iterator[None]:
    """Turn errors of the `datasets` library into a DataError that says which files can't be read, and why."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except DataError:
        raise
    except (ValueError, DatasetGenerationError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        which = str(files[0]) if len(files) == 1 else f"one of the {len(files)} files beside {files[0]}"
        reason = " ".join(str(cause).split())
        raise DataError(
            f"{which} can't be read as {file_format} ({reason}); repair the file or leave it out"
        ) from error


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
        raise _no_text(text_column, where, f"a value of type {type(value).__name__}")
    return value


def _no_text(text_column: str, where: str, found: str) -> DataError:
    return DataError(
        f"text_column = {text_column!r}: {where} holds {found} where there should be texts; "
        f"name a column of texts, or leave such rows out"
    )
