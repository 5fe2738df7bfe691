"""A disk that takes no more, wherever a run meets it first: one line gives the file, the reason and the files that remain.

A checkpoint's own errors come to `titanplans.training.checkpoint.manager` from all ranks together; what is here is for
what one rank writes by itself: its log, metrics, reports, a folder of weights. Needs no torch.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titanplans.errors import NotSaved

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def reason(error: OSError) -> str:
    """Return why the system has refused, in words."""
    return "no space is left" if error.errno == errno.ENOSPC else (error.strerror or str(error))


def is_refusal(error: BaseException | None) -> bool:
    """Whether a disk refuses to be written to: it is full, the quota is used up, it fails, or became read-only."""
    return isinstance(error, OSError) and error.errno in _REFUSALS


def is_taken(path: Path) -> bool:
    """Whether something is at `path` that a new folder would overwrite: anything but an empty folder."""
    return os.path.exists(path) and not (path.is_dir() and not any(path.iterdir()))


def sync(path: str | os.PathLike[str]) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an error of the system in the body have the file's name: by itself it has one only where a file is opened."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file, in a folder that is made, whole or not at all: another process may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with naming(part):
        part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextmanager
def one_line(resume_point: Callable[[], str]) -> Iterator[None]:
    """Turn the error of a disk that refuses a write in the body into one line.

    Args:
        resume_point: says from where the job can resume.

    Raises:
        NotSaved: the disk refused.
    """
    try:
        yield
    except OSError as error:
        if not is_refusal(error):
            raise
        raise NotSaved(
            f"{error.filename or 'a file'} can't be written ({reason(error)}); {resume_point()}"
        ) from error
