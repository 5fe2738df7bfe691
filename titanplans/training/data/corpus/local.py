"""Local corpora: the files that a path stands for, their split, and text files cut into documents.

A corpus that comes without a split of its own gets one that is the same on every rank and in every run: one part in twenty
is kept for validation. No random state is involved, so the sides of a split never meet, whatever the job's seed. Rows of
.jsonl and .parquet files are in `rows.py`. The order over an epoch is decided in `sources.py`.
"""

import glob
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from titanplans.errors import DataError
from titanplans.training.data.corpus.column import FRAGMENT_BYTES, boundary
from titanplans.training.data.reading import refusing

FORMATS = {"text": (".txt", ".md", ".py"), "json": (".jsonl", ".json"), "parquet": (".parquet",)}
"""Format -> the extensions of its files. The names are those of the `datasets` library's builders."""
SPLITS = ("train", "validation", "all")
VALIDATION_EVERY = 20
"""One file, or document, in this many is for validation."""


def find_files(path: str, wanted: str | None = None) -> tuple[Path, list[Path], str]:
    """Return the files that `path` (a file, a folder or a glob; `**` descends) stands for.

    Args:
        path: the job's `dataset_path`.
        wanted: a key of FORMATS, or None to go by the extensions.

    Returns:
        The folder that relative names start from, the files sorted by name, their format.

    Raises:
        DataError: nothing there, nothing of a known format, or more than one format.
    """
    shown = f"dataset_path = {path!r}"
    try:
        root, found = _below(path)
        found = sorted(file for file in found if file.is_file() and file.stat().st_size > 0)
    except OSError as error:  # a name that is too long, a folder that may not be read
        where = f" {error.filename}" if error.filename not in (None, path) else ""
        raise DataError(
            f"{shown}:{where} can't be read ({error.strerror}); name a folder that holds texts alone, and may be read"
        ) from error
    if not found:
        raise DataError(
            f"{shown}: there is no file with anything in it; give a file, a folder or a glob such as 'corpus/*.jsonl'"
        )
    if wanted is not None and not Path(path).is_dir():
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


def _below(path: str) -> tuple[Path, list[Path]]:
    """Return the folder that `path` starts from, and every file that it stands for, but hidden ones in a folder."""
    given = Path(path)
    if given.is_file():
        return given.parent, [given]
    if given.is_dir():
        root, found = given, walk(given)
    elif glob.has_magic(path):
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), given.parts))
        found = map(Path, glob.iglob(path, recursive=True))
    else:
        raise DataError(
            f"dataset_path = {path!r}: no such file or folder; give a file, a folder or a glob such as 'corpus/*.jsonl'"
        )
    if root.resolve() == Path(root.anchor or "/") and (given.is_dir() or "**" in given.parts):
        raise DataError(
            f"dataset_path = {path!r}: that is every file of this machine; name the folder with the texts"
        )
    return root, list(found)


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below, but hidden ones; none if there is no such folder."""
    if not folder.is_dir():
        return

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def split_names(names: Sequence[str], split: str) -> list[int]:
    """Return the indices into `names` (paths relative to the corpus) that belong to `split`.

    Validation gets the names with the smallest hashes, one in twenty, rounded up: it is never empty and never lopsided, and
    moving the corpus to another folder moves no file to the other side.
    """
    by_hash = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    held_out = set(by_hash[: -(-len(names) // VALIDATION_EVERY)])
    return [i for i in range(len(names)) if split == "all" or (i in held_out) == (split == "validation")]


def in_split(numbers: np.ndarray, split: str) -> np.ndarray:
    """Whether each document, by its number, belongs to `split`: every twentieth, from the first on, is for validation."""
    return (split == "all") | ((numbers % VALIDATION_EVERY == 0) == (split == "validation"))


class TextFiles:
    """Documents cut from UTF-8 text files, about `fragment_bytes` each, at line ends.

    The constructor reads only the files' sizes. A fragment holds the lines that begin in its range of bytes (a longer line
    is cut), so that the fragments of a file concatenate to the file. Twenty files or more are split by file; of fewer,
    every twentieth fragment is for validation.
    """

    def __init__(
        self, root: Path, files: Sequence[Path], split: str, fragment_bytes: int = FRAGMENT_BYTES
    ) -> None:
        self.fragment_bytes, self.identity = fragment_bytes, {"piece_bytes": fragment_bytes}
        names = [file.relative_to(root).as_posix() for file in files]
        by_file = len(files) >= VALIDATION_EVERY
        kept = split_names(names, split) if by_file else range(len(files))
        self.files = [(names[i], files[i]) for i in kept]
        self._sizes = {file: file.stat().st_size for _, file in self.files}
        self._fragments = [
            (file, start) for file, size in self._sizes.items() for start in range(0, size, fragment_bytes)
        ]
        if not by_file:
            kept = in_split(np.arange(len(self._fragments)), split)
            self._fragments = list(itertools.compress(self._fragments, kept))

    def __len__(self) -> int:
        return len(self._fragments)

    def document(self, i: int) -> str:
        """Return document `i`. Raises DataError if it can't be read, is not UTF-8, or the file has become shorter."""
        file, start = self._fragments[i]
        size = self._sizes[file]

        with refusing(f"{file} can't be read"), file.open("rb") as stream:

            def read(offset: int, length: int) -> bytes:
                stream.seek(offset)
                return stream.read(min(length, size - offset))

            begin, end = (
                boundary(read, offset, self.fragment_bytes, size)
                for offset in (start, start + self.fragment_bytes)
            )
            raw, now = read(begin, end - begin), os.fstat(stream.fileno()).st_size
        if now < size:
            raise DataError(
                f"{file} has {now:,} bytes, and had {size:,} when the job began: it was cut while it was read; restore it "
                "and resume"
            )
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}: byte {begin + error.start} is not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from error


# Third-party packages, tests (half of the bytes, much of it tables of expected values), and what is
# generated: character tables, and the build's own settings with paths of the machine that made it.
_LEFT_OUT_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
}
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "config-")
STDLIB_FRAGMENT_BYTES = 1024
"""Short documents: a small batch, 2,000 tokens say, is then cut from several files."""


def stdlib_root() -> Path:
    """The folder of the standard library's sources, that of the base Python in a virtual environment."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files(root: Path) -> list[Path]:
    """The standard library's `.py` files that count as text, in the order of their relative paths: about 10 MB.

    They are the default corpus, English and code on every machine that can run a job, so that a first one needs no download.
    """
    files: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS]
        kept = [name for name in names if name.endswith(".py") and not name.startswith(_LEFT_OUT_PREFIXES)]
        files += [Path(parent, name) for name in kept]
    return sorted(filter(os.path.getsize, files), key=lambda file: file.relative_to(root).as_posix())
