"""`locked_folder` locks a folder for one process and refuses other processes; `locked_file` lets them wait. Imports no
torch."""

import contextlib
import errno
import fcntl
import logging
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from titanplans.errors import ConfigError

LOCK = "titanplans.lock"
"""The file in the folder that is locked. Its content only names the process that holds the lock."""
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path` in the body, after waiting for any process that holds it. The empty file stays.

    On a file system without locks nothing is locked, and a warning is logged.

    Raises:
        OSError: the file can't be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning(
                f"{path} can't be locked ({error.strerror}), so other processes may do the same work"
            )
        yield


@contextlib.contextmanager
def locked_folder(folder: Path, option: str) -> Iterator[None]:
    """Create `folder`, and hold its lock in the body.

    Args:
        folder: the folder.
        option: the option that names it, with its value, for messages.

    Raises:
        ConfigError: another process holds the lock (the message names the process, its machine and the time), or the
            folder can't be created.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The file is never removed: another job may have opened it, and would then lock a file that no longer has a
            # name.
            file = stack.enter_context(open(folder / LOCK, "a+"))
        except OSError as error:
            raise ConfigError(
                f"{option}: {folder} can't be made and locked ({error.strerror}); name another folder"
            ) from error
        file.seek(0)
        holder = file.read().strip() or "whose process is not recorded yet"
        try:
            # The operating system releases this lock when the process ends, however it ends. lockf is used instead of flock,
            # because a lock of lockf does not pass to forks of the process, and most network file systems support lockf.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise ConfigError(
                    f"{option}: another job writes to {folder.absolute()}, {holder}; stop it, wait for it, or name another "
                    "folder"
                ) from error
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning(
                f"{folder} can't be locked ({error.strerror}), so another job could write to it, too"
            )
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        print(f"process {os.getpid()} on {platform.node()} since {since}", file=file, flush=True)
        yield
        file.truncate(0)
