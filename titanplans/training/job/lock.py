"""One job in a folder: who writes there locks it, and another that wants to is refused."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from titanplans.config import JobConfig
from titanplans.lock import locked_folder
from titanplans.text import show
from titanplans.training.checkpoint.folder import own_folder


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
            stack.enter_context(locked_folder(folder, f"{key} = {show(value)}"))
        yield
