"""Whether the files of a corpus are still those of the checkpoint: sizes, and samples of their contents.

A file is sampled in blocks spread over it, its first and last among them; one that is no larger than its blocks is read
whole. A change between the blocks of a large file that leaves its size alone is not seen: that such a file was written to
later is said.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from titanplans.errors import DataError
from titanplans.training.job.reading import reading

_BLOCK = 4096
_BLOCKS = 4096
"""Read of all files together, but at least three of each and at most 64."""


@dataclass(frozen=True)
class Fingerprint:
    """Files by their names, relative to the corpus."""

    files: dict[str, str]
    """Name -> hash of size and samples."""
    newest: int
    """When a file was last written to, in nanoseconds since 1970."""
    paths: dict[str, Path]
    """Name -> where it is; empty in one that was read from a checkpoint."""
    written: dict[str, int]
    """Name -> when that file was last written to; empty likewise."""

    @classmethod
    def of(cls, files: Sequence[tuple[str, Path]]) -> "Fingerprint":
        """Return that of `files`, pairs of name and path.

        Raises:
            DataError: one can't be read.
        """
        contents, written = {}, {}
        blocks = max(3, min(64, _BLOCKS // max(1, len(files))))
        for name, path in files:
            contents[name], written[name] = _sample(path, blocks)
        return cls(contents, max(written.values(), default=0), dict(files), written)

    def to_json(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps."""
        return {"contents": self.files, "newest": self.newest}

    @classmethod
    def from_json(cls, values: dict[str, Any], current: "Fingerprint") -> "Fingerprint":
        """Return what `to_json` wrote down; earlier versions kept hashes of the names, which `current` may know."""
        names = {_digest(xxhash.xxh3_64(name.encode())): name for name in current.files}
        contents = {names.get(name, name): content for name, content in values["contents"].items()}
        return cls(contents, values["newest"], {}, {})


def check_files(saved: Fingerprint, current: Fingerprint, reads_the_same: Callable[[], bool]) -> str | None:
    """Refuse files that are not the checkpoint's, by name, unless what was read before its place `reads_the_same`.

    Returns:
        A line for the log about files that were touched, or have changed elsewhere.

    Raises:
        DataError: the place would be in other text.
    """
    new = [str(path) for name, path in current.paths.items() if name not in saved.files]
    changed = [
        str(path)
        for name, path in current.paths.items()
        if saved.files.get(name, current.files[name]) != current.files[name]
    ]
    gone = sorted(saved.files.keys() - current.files.keys())
    if new or changed or gone:
        found = [
            _words(changed, "has changed", "have changed"),
            _words(new, "is new", "are new"),
            _words(gone, "can't be found", "can't be found"),
        ]
        said = f"since the checkpoint {', '.join(filter(None, found))}"
        if reads_the_same():
            return f"{said}; what was read before its place is the same, so training goes on from there"
        raise DataError(
            f"{said}, and with that the order of the documents or a text that has been read: restore the files, or give up "
            'the place, and read the data anew, by exclude_from_loading = ["dataloader"] in [checkpoint]'
        )
    later = [str(path) for name, path in current.paths.items() if current.written[name] > saved.newest]
    if not later:
        return None
    return (
        f"{_words(later, 'was', 'were')} written to, or copied, after the checkpoint; size and samples of the contents "
        "are the same, so training goes on"
    )


def _words(paths: list[str], one: str, many: str) -> str:
    """The first of some files, how many more there are, and what they do; "" of none."""
    if len(paths) < 2:
        return "".join(f"{path} {one}" for path in paths)
    return f"{paths[0]} and {len(paths) - 1} more {many}"


def _sample(path: Path, blocks: int) -> tuple[str, int]:
    """The hash of a file's size and blocks, and when it was last written to."""
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            digest = xxhash.xxh3_64(str(status.st_size).encode())
            if status.st_size <= blocks * _BLOCK:
                digest.update(os.pread(descriptor, blocks * _BLOCK, 0))
            else:
                last = status.st_size - _BLOCK
                for i in range(blocks):
                    digest.update(os.pread(descriptor, _BLOCK, last * i // (blocks - 1)))
        finally:
            os.close(descriptor)
    return _digest(digest), status.st_mtime_ns


def _digest(hashed: "xxhash.xxh3_64") -> str:
    return hashed.hexdigest()[:12]
