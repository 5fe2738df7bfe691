"""Whether the files of a corpus are still those of the checkpoint: sizes, and samples of their contents.

A file is sampled in blocks spread over it, its first and last among them; one that is no larger than its blocks is read
whole. A change between the blocks of a large file that leaves its size alone is not seen.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

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


def _sample(path: Path, blocks: int) -> str:
    """The hash of a file's size and blocks."""
    with refusing(f"{path} can't be read"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        whole, last = size <= blocks * _BLOCK, size - _BLOCK
        digest = xxhash.xxh3_64(str(size).encode())
        for place in [0] if whole else [last * i // (blocks - 1) for i in range(blocks)]:
            file.seek(place)
            digest.update(file.read(blocks * _BLOCK if whole else _BLOCK))
    return digest.hexdigest()[:12]
