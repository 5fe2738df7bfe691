"""Let rank 0 write: `written_atomically` writes a complete folder or none, `on_first_rank` raises errors on all ranks."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titanplans.disk import is_taken, reason, sync
from titanplans.errors import ModelError, NotSaved, RunError, UserError
from titanplans.split.objects import broadcast_object, rank


@contextmanager
def written_atomically(target: Path) -> Iterator[Path]:
    """Create a temporary folder next to `target`, and rename it to `target` after the body; remove it after an error.

    Collective: rank 0 creates and renames the folder, and errors are raised on every rank.

    Raises:
        ModelError: `target` exists or is a mount point; or another process is writing it, or was killed while it was
            writing.
        NotSaved: the folder can't be created or renamed.
    """
    target = target.resolve()  # resolves symbolic links, and the name of "."
    directory = target.with_name(f".{target.name}.writing")

    def begin() -> None:
        if target.is_mount():
            raise ModelError(
                f"{target} is a mount point, which no folder can replace: name a new folder in it"
            )
        if is_taken(target):
            raise ModelError(f"{target} already exists and is not overwritten; name a new folder")
        if os.path.exists(directory):
            raise ModelError(
                f"{directory} exists: another process is writing {target}, or was killed while it wrote it; if no "
                "process is writing it, remove it"
            )
        directory.mkdir(parents=True)

    def end() -> None:
        directory.rename(target)
        sync(target.parent)

    on_first_rank(begin, target)
    try:
        yield directory
        on_first_rank(end, target)
    except BaseException:
        if rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def on_first_rank(
    action: Callable[[], None], path: Path, *, then: Callable[[], object] = lambda: None
) -> None:
    """Run `action` on rank 0 only, and raise its error on every rank. Collective.

    Args:
        action: writes files.
        path: the file or folder that is written, for the message.
        then: runs on every rank after `action`, even if `action` failed.

    Raises:
        ModelError: `action` raised a UserError.
        NotSaved: `action` raised another error.
    """
    cause: Exception | None = None
    failure: tuple[type[Exception], str] | None = None
    if rank() == 0:
        try:
            action()
        except (UserError, RunError) as error:
            cause, failure = error, (ModelError if isinstance(error, UserError) else NotSaved, str(error))
        except OSError as error:
            cause, failure = error, (NotSaved, f"{error.filename or path} can't be written ({reason(error)})")
        except Exception as error:  # noqa: BLE001  the other ranks wait for this one, whatever the error
            message = " ".join(str(error).split())
            cause, failure = error, (NotSaved, f"{path} can't be written: {type(error).__name__}: {message}")
    then()
    if (failure := broadcast_object(failure)) is not None:
        error_class, message = failure
        raise error_class(message) from cause
