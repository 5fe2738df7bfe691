"""A lock on the folders that a job writes to: a second job that would write there is refused.

The operating system's lock on `titanplans.lock` in the folder ends with the process that holds it, however that ends. The
file's content only names the current or the last holder. The lock belongs to a process (lockf, not flock), so a fork does
not hold it, and most network file systems support it.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanplans.config import ConfigError, JobConfig
from titanplans.text import show
from titanplans.training.checkpoint.match import own_folder

LOCK = "titanplans.lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(job: JobConfig) -> Iterator[None]:
    """Make and lock the folders that `job` writes to: dump_folder, and that of the checkpoints if it saves any.

    Raises:
        ConfigError: another process holds one; which, on which machine, and since when.
    """
    held = [("job.dump_folder", job.job.dump_folder, Path(job.job.dump_folder))]
    if job.checkpoint.enable and not job.checkpoint.load_only:
        held.append(("checkpoint.folder", job.checkpoint.folder, own_folder(job)))
    with contextlib.ExitStack() as stack:
        for key, value, folder in held:
            stack.enter_context(_lock(folder, f"{key} = {show(value)}"))
        yield


@contextlib.contextmanager
def _lock(folder: Path, what: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        before = _read(descriptor)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise ConfigError(
                    f"{what}: another job writes to {folder.absolute()}, {_words(before)}; stop it, wait for it, or "
                    "name another folder"
                ) from error
            if error.errno not in _NO_LOCKS:
                raise
            last = f"; the last job there: {_words(before)}" if before else ""
            _log.warning(
                f"{folder} can't be locked ({error.strerror}), so another job could write to it, too{last}"
            )
        else:
            if before and before.get("host") != platform.node():
                _log.warning(
                    f"{folder} was left by {_words(before)}, without a lock: it has ended, or locks do not reach from "
                    "machine to machine there; if it still runs, stop one of the two jobs"
                )
        _write(descriptor, json.dumps({"host": platform.node(), "pid": os.getpid(), "since": _now()}))
        yield
        _write(descriptor, "")
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> dict[str, Any]:
    """Return the holder that the file names; nothing if it is empty or being written."""
    with contextlib.suppress(ValueError):
        found = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(found, dict):
            return found
    return {}


def _words(owner: dict[str, Any]) -> str:
    if not owner:
        return "whose process is not recorded yet"
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
