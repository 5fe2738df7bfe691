"""Whether the files of a corpus are still those of the checkpoint: sizes, and samples of their contents.

A file is sampled in blocks spread over it, its first and last among them; one that is no larger than its blocks is read
whole. A change between the blocks of a large file that leaves its size alone is not seen: that such a file was written to
later is logged.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from torchtitan.tools.logging import logger

from titanplans.errors import DataError

_BLOCK = 4096
_BLOCKS = 4096
"""Read of all files together, but at least three of each and at most 64."""


@dataclass(frozen=True)
class Fingerprint:
    """Files by the hashes of their names."""

    files: dict[str, str]
    """Hash of the name, relative to the corpus -> hash of size and samples."""
    newest: int
    """When a file was last written to, in nanoseconds since 1970."""
    paths: dict[str, Path]
    """Hash of the name -> where it is; empty in one that was read from a checkpoint."""
    written: dict[str, int]
    """Hash of the name -> when that file was last written to; empty likewise."""

    @classmethod
    def of(cls, files: Sequence[tuple[str, Path]]) -> "Fingerprint":
        """Return that of `files`, pairs of name and path.

        Raises:
            DataError: one can't be read.
        """
        contents, paths, written = {}, {}, {}
        blocks = max(3, min(64, _BLOCKS // max(1, len(files))))
        for name, path in files:
            key = _digest(xxhash.xxh3_64(name.encode()))
            contents[key], written[key] = _sample(path, blocks)
            paths[key] = path
        return cls(contents, max(written.values(), default=0), paths, written)

    def to_json(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps."""
        return {"contents": self.files, "newest": self.newest}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Fingerprint":
        """Return what `to_json` wrote down."""
        return cls(values["contents"], values["newest"], {}, {})


def check_files(saved: Fingerprint, current: Fingerprint) -> None:
    """Refuse files that are not the checkpoint's (`DataError`), by name."""
    new = [path for key, path in current.paths.items() if key not in saved.files]
    changed = [
        path
        for key, path in current.paths.items()
        if saved.files.get(key, current.files[key]) != current.files[key]
    ]
    gone = len(saved.files.keys() - current.files.keys())
    if new or changed or gone:
        found = [
            _words(changed, "has changed", "have changed"),
            _words(new, "is new", "are new"),
            f"{gone} that {'was' if gone == 1 else 'were'} there can't be found" if gone else "",
        ]
        raise DataError(
            f"since the checkpoint {', '.join(filter(None, found))}, so its place in the data would be in other text; "
            'restore the files, or start the data anew with exclude_from_loading = ["dataloader"] in [checkpoint]'
        )
    later = [path for key, path in current.paths.items() if current.written[key] > saved.newest]
    if later:
        logger.info(
            f"{_words(later, 'was', 'were')} written to, or copied, after the checkpoint; size and samples of the contents "
            "are the same, so training goes on"
        )


def _words(paths: list[Path], one: str, many: str) -> str:
    """The first of some files, how many more there are, and what they do; "" of none."""
    if len(paths) < 2:
        return "".join(f"{path} {one}" for path in paths)
    return f"{paths[0]} and {len(paths) - 1} more {many}"


def _sample(path: Path, blocks: int) -> tuple[str, int]:
    """The hash of a file's size and blocks, and when it was last written to."""
    try:
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
    except OSError as error:
        raise DataError(
            f"{path} can't be read ({error.strerror}); repair the file or leave it out"
        ) from error
    return _digest(digest), status.st_mtime_ns


def _digest(hashed: "xxhash.xxh3_64") -> str:
    return hashed.hexdigest()[:12]
