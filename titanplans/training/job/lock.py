"""One job a folder: a job locks the folders that it writes to, and a second one is refused.

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

from titanplans.config import ConfigError, JobConfig
from titanplans.text import show
from titanplans.training.checkpoint.folder import own_folder

LOCK = "titanplans.lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(job: JobConfig) -> Iterator[None]:
    """Make and lock the folders that `job` writes to: dump_folder, and that of its checkpoints if it saves any.

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
    # It stays there: another job may have opened it, and would lock what no longer has a name.
    with open(folder / LOCK, "a+") as file:
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
