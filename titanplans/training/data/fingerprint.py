"""Whether the files of a corpus are still those of the checkpoint: sizes, and samples of their contents.

A file is sampled in blocks spread over it, its first and last among them; one that is no larger than its blocks is read
whole. A change between the blocks of a large file that leaves its size alone is not seen.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from titanplans.errors import DataError
from titanplans.training.data.reading import refusing

_BLOCK = 4096
_BLOCKS = 4096
"""Read of all files together, but at least three of each and at most 64."""


def fingerprint(files: Sequence[tuple[str, Path]]) -> dict[str, str]:
    """Return a hash of size and samples by the name of each file; `files` are pairs of name and path.

    Raises:
        DataError: one can't be read.
    """
    blocks = max(3, min(64, _BLOCKS // max(1, len(files))))
    return {name: _sample(path, blocks) for name, path in files}


def check_files(
    saved: dict[str, str],
    current: dict[str, str],
    paths: dict[str, Path],
    reads_the_same: Callable[[], bool],
) -> str | None:
    """Refuse files that are not the checkpoint's, by name, unless what was read before its place `reads_the_same`.

    `saved` and `current` are fingerprints, `paths` those of the current files.

    Returns:
        A line for the log about files that have changed elsewhere.

    Raises:
        DataError: the place would be in other text.
    """
    if saved == current:
        return None
    changed = [str(paths[name]) for name in current.keys() & saved.keys() if saved[name] != current[name]]
    found = [
        _words(sorted(changed), "has changed", "have changed"),
        _words([str(paths[name]) for name in sorted(current.keys() - saved.keys())], "is new", "are new"),
        _words(sorted(saved.keys() - current.keys()), "can't be found", "can't be found"),
    ]
    said = f"since the checkpoint {', '.join(filter(None, found))}"
    if reads_the_same():
        return f"{said}; what was read before its place is the same, so training goes on from there"
    raise DataError(
        f"{said}, and with that the order of the documents or a text that has been read: restore the files, or give up "
        'the place, and read the data anew, by exclude_from_loading = ["dataloader"] in [checkpoint]'
    )


def _words(paths: list[str], one: str, many: str) -> str:
    """The first of some files, how many more there are, and what they do; "" of none."""
    if len(paths) < 2:
        return "".join(f"{path} {one}" for path in paths)
    return f"{paths[0]} and {len(paths) - 1} more {many}"


def _sample(path: Path, blocks: int) -> str:
    """The hash of a file's size and blocks."""
    with refusing(f"{path} can't be read", "repair the file or leave it out"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        whole, last = size <= blocks * _BLOCK, size - _BLOCK
        digest = xxhash.xxh3_64(str(size).encode())
        for place in [0] if whole else [last * i // (blocks - 1) for i in range(blocks)]:
            file.seek(place)
            digest.update(file.read(blocks * _BLOCK if whole else _BLOCK))
    return digest.hexdigest()[:12]
