"""One writer to a folder: who writes there locks it, and another that wants to is refused. Needs no torch.

The lock is the system's, on `titanplans.lock` in the folder, and goes with the process that holds it, however that ends.
The file's content only names the holder. The lock belongs to a process (lockf, not flock), so a fork does
not hold it, and most network file systems support it.
"""

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
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked_folder(folder: Path, what: str) -> Iterator[None]:
    """Hold `folder`, which is made; `what`, its key and value, begins the message of an error.

    Raises:
        ConfigError: another process holds it (which, on which machine, and since when), or it can't be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # It stays there: another job may have opened it, and would lock what no longer has a name.
            file = stack.enter_context(open(folder / LOCK, "a+"))
        except OSError as error:
            raise ConfigError(
                f"{what}: {folder} can't be made and locked ({error.strerror}); name another folder"
            ) from error
        file.seek(0)
        holder = file.read().strip() or "whose process is not recorded yet"
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise ConfigError(
                    f"{what}: another job writes to {folder.absolute()}, {holder}; stop it, wait for it, or name another "
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
