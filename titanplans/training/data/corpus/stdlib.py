"""The default corpus: the sources of the Python that runs the job.

About 10 MB of real English and code on every machine that can run the job at all, so the first
training run needs no download. Lists the files and no more: reading, splitting and shuffling are
those of any other text files (see `local.py`).
"""

import os
import sysconfig
from pathlib import Path

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
STDLIB_PIECE_BYTES = 1024
"""Short documents: a small batch, 2,000 tokens say, is then cut from several files."""


def stdlib_root() -> Path:
    """The folder of the standard library's sources, that of the base Python in a virtual environment."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files(root: Path) -> list[Path]:
    """The standard library's `.py` files that count as text, in the order of their relative paths."""
    files: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS]
        kept = [name for name in names if name.endswith(".py") and not name.startswith(_LEFT_OUT_PREFIXES)]
        files += [Path(parent, name) for name in kept]
    return sorted(filter(os.path.getsize, files), key=lambda file: file.relative_to(root).as_posix())
