"""Local corpora: the files that a path names (`find_files`), their split, and text files cut into documents (`TextFiles`).

`rows.py` reads the rows of .jsonl and .parquet files, and `sources.py` decides the order of an epoch.
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
from titanplans.training.data.data_errors import as_data_error

FORMATS = {"text": (".txt", ".md", ".py"), "json": (".jsonl", ".json"), "parquet": (".parquet",)}
"""The extensions of files, by format. The formats have the names of the `datasets` library's builders."""
SPLITS = ("train", "validation", "all")


def is_hub_name(dataset: str) -> bool:
    """Whether a job's `dataset` names a data set of the Hugging Face Hub."""
    return dataset not in ("local", "stdlib", *FORMATS)


VALIDATION_EVERY = 20
"""One in this many files or documents is for validation. The split involves no random state: it is the same on every rank,
in every run and for every seed."""


def find_files(path: str, file_format: str | None = None) -> tuple[Path, list[Path], str]:
    """Return the files that `path` names: a file, a folder or a glob, in which `**` stands for any subfolders.

    Args:
        path: the job's `dataset_path`.
        file_format: a key of FORMATS; None: decided by the extensions.

    Returns:
        The folder that names of files are relative to, the files sorted by name, and their format.

    Raises:
        DataError: all files are empty, none has a known format, or they have several formats.
    """
    shown = f"dataset_path = {path!r}"
    try:
        root, candidates = _candidate_files(path)
        candidates = sorted(file for file in candidates if file.is_file() and file.stat().st_size > 0)
    except OSError as error:  # e.g. a name that is too long, or a folder that may not be read
        where = f" {error.filename}" if error.filename not in (None, path) else ""
        raise DataError(
            f"{shown}:{where} can't be read ({error.strerror}); name a readable folder that holds only texts"
        ) from error
    if not candidates:
        raise DataError(
            f"{shown}: there is no file, or all are empty; give a file, a folder or a glob such as 'corpus/*.jsonl'"
        )
    if file_format is not None and not Path(path).is_dir():
        return root, candidates, file_format
    formats = {file_format: FORMATS[file_format]} if file_format is not None else FORMATS
    by_format = {
        name: [file for file in candidates if file.suffix.lower() in extensions]
        for name, extensions in formats.items()
    }
    by_format = {name: files for name, files in by_format.items() if files}
    supported = ", ".join(extension for extensions in formats.values() for extension in extensions)
    if not by_format:
        extensions = ", ".join(sorted({file.suffix or file.name for file in candidates})[:8])
        raise DataError(f"{shown}: holds {extensions}; the supported extensions are {supported}")
    if len(by_format) > 1:
        counts = " and ".join(f"{len(files)} {name}" for name, files in by_format.items())
        raise DataError(
            f"{shown}: holds {counts} files; name one format with dataset = 'text', 'json' or 'parquet'"
        )
    ((name, files),) = by_format.items()
    return root, files, name


def _candidate_files(path: str) -> tuple[Path, list[Path]]:
    """Return the folder that `path` starts from, and all files that it names; hidden files of a folder are left out."""
    path_ = Path(path)
    if path_.is_file():
        return path_.parent, [path_]
    if path_.is_dir():
        root, files = path_, walk(path_)
    elif glob.has_magic(path):
        root = Path(*itertools.takewhile(lambda name: not glob.has_magic(name), path_.parts))
        files = map(Path, glob.iglob(path, recursive=True))
    else:
        raise DataError(
            f"dataset_path = {path!r}: no such file or folder; give a file, a folder or a glob such as 'corpus/*.jsonl'"
        )
    if root.resolve() == Path(root.anchor or "/") and (path_.is_dir() or "**" in path_.parts):
        raise DataError(
            f"dataset_path = {path!r}: these are all files of this machine; name the folder with the texts"
        )
    return root, list(files)


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, without hidden ones; nothing if there is no such folder."""
    if not folder.is_dir():
        return

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def split_names(names: Sequence[str], split: str) -> list[int]:
    """Return the indices of the `names` that belong to `split`; names are paths relative to the corpus.

    The validation split has the names with the smallest hashes, one in 20, rounded up. So it is never empty, and moving the
    corpus to another folder does not change the split.
    """
    by_hash = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    validation = set(by_hash[: -(-len(names) // VALIDATION_EVERY)])
    return [i for i in range(len(names)) if split == "all" or (i in validation) == (split == "validation")]


def in_split(indices: np.ndarray, split: str) -> np.ndarray:
    """Return which documents belong to `split`, given their indices. Every 20th, beginning with 0, is for validation."""
    return (split == "all") | ((indices % VALIDATION_EVERY == 0) == (split == "validation"))


class TextFiles:
    """Documents of about `fragment_bytes` bytes, cut from UTF-8 text files at line ends.

    The constructor reads only the files' sizes. A document consists of the lines that begin in its range of bytes; lines
    longer than a document are cut. So the documents of a file, put together, are the file. If there are 20 files or more,
    whole files are for validation; otherwise every 20th document is.

    Args:
        root: the folder that names of files are relative to.
        files: the files.
        split: "train", "validation" or "all".
        fragment_bytes: the approximate size of a document.
    """

    def __init__(
        self, root: Path, files: Sequence[Path], split: str, fragment_bytes: int = FRAGMENT_BYTES
    ) -> None:
        self.fragment_bytes, self.identity = fragment_bytes, {"piece_bytes": fragment_bytes}
        names = [file.relative_to(root).as_posix() for file in files]
        splits_files = len(files) >= VALIDATION_EVERY
        indices = split_names(names, split) if splits_files else range(len(files))
        self.files = [(names[i], files[i]) for i in indices]
        self._sizes = {file: file.stat().st_size for _, file in self.files}
        self._fragments = [
            (file, start) for file, size in self._sizes.items() for start in range(0, size, fragment_bytes)
        ]
        if not splits_files:
            is_used = in_split(np.arange(len(self._fragments)), split)
            self._fragments = list(itertools.compress(self._fragments, is_used))

    def __len__(self) -> int:
        return len(self._fragments)

    def document(self, i: int) -> str:
        """Return document `i`. Raises DataError if it can't be read, is not UTF-8, or the file has become shorter."""
        path, start = self._fragments[i]
        size = self._sizes[path]

        with as_data_error(f"{path} can't be read"), path.open("rb") as file:

            def read(offset: int, length: int) -> bytes:
                file.seek(offset)
                # Do not read beyond the size at the beginning of the job: the file may have grown.
                return file.read(min(length, size - offset))

            begin, end = (
                boundary(read, offset, self.fragment_bytes, size)
                for offset in (start, start + self.fragment_bytes)
            )
            raw, current_size = read(begin, end - begin), os.fstat(file.fileno()).st_size
        if current_size < size:
            raise DataError(
                f"{path} has {current_size:,} bytes, and had {size:,} when the job began: it was truncated while it was "
                "read; restore it and resume"
            )
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: byte {begin + error.start} is not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from error


# The corpus leaves out third-party packages; tests, which are half of the bytes and have many tables of expected values; and
# generated files: character tables, and build settings with paths of the machine that built Python.
_EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
}
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
STDLIB_FRAGMENT_BYTES = 1024
"""Documents are short, so that a small batch of, say, 2,000 tokens has text of several files."""


def stdlib_root() -> Path:
    """Return the folder of the standard library's sources, also in a virtual environment."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files(root: Path) -> list[Path]:
    """Return the `.py` files of the default corpus, sorted by their relative paths: about 10 MB.

    Every machine that can run a job has this corpus of English and code, so that a first job needs no download.
    """
    files: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]
        files += [
            Path(parent, name)
            for name in names
            if name.endswith(".py") and not name.startswith(_EXCLUDED_PREFIXES)
        ]
    return sorted(filter(os.path.getsize, files), key=lambda file: file.relative_to(root).as_posix())
