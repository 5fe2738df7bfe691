"""Write files safely, and report a disk that refuses writes in one line. Imports no torch.

The functions are for files that one rank writes by itself: its log, metrics, reports, a folder of weights. Errors of
distributed checkpoints are raised on all ranks, and `titanplans.training.checkpoint.manager` reports them.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titanplans.errors import NotSaved

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def reason(error: OSError) -> str:
    """Return the system's reason for an error, in words."""
    return "no space is left" if error.errno == errno.ENOSPC else (error.strerror or str(error))


def is_refusal(error: BaseException | None) -> bool:
    """Return whether a disk refuses writes: it is full, fails or has become read-only, or the quota is used up."""
    return isinstance(error, OSError) and error.errno in _REFUSALS


def is_taken(path: Path) -> bool:
    """Return whether a new folder at `path` would overwrite something; an empty folder does not count."""
    return os.path.exists(path) and not (path.is_dir() and not any(path.iterdir()))


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def name_file_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add a file's name to an OSError of the body that has none, such as an error of `write`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a file completely or not at all, so that another process can read it at any time; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.part")
    with name_file_in_errors(temporary):
        temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@contextmanager
def raise_not_saved(resume_point: Callable[[], str]) -> Iterator[None]:
    """Raise a `NotSaved` of one line for an OSError of the body, if a disk refuses a write.

    Args:
        resume_point: returns a phrase that says which checkpoint the job can resume from.

    Raises:
        NotSaved: a disk refused a write.
    """
    try:
        yield
    except OSError as error:
        if not is_refusal(error):
            raise
        raise NotSaved(
            f"{error.filename or 'a file'} can't be written ({reason(error)}); {resume_point()}"
        ) from error
