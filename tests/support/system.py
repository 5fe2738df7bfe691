"""Change the environment of a test: install a package, or fill the disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def install_entry_point(folder: Path, group: str, name: str, value: str) -> None:
    """Write the metadata of an installed package into `folder`, with the entry point `name = value` in `group`."""
    info = folder / f"{value.partition('.')[0]}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {info.stem[:-2]}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files to `size` bytes, which has the effect of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
