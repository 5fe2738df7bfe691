"""What rank 0 writes for all: a folder that is whole or not there, and errors that every rank gets alike."""

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
    """Give the body a temporary folder next to `target`, renamed to `target` once the body is done. Collective.

    Raises:
        ModelError: on every rank: `target` exists or is a mount point, or another process is writing it, or was killed.
        NotSaved: on every rank: the system refuses.
    """
    target = target.resolve()  # a link's folder is written, and "." has a name
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
                f"{directory} is there: another process writes {target}, or one was killed while it did; if so, remove it"
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
    """Do `action` on rank 0, and `then` on every rank; raise its error on every rank.

    Args:
        action: writes files.
        path: the written path, for the error.
        then: done though it has failed.

    Raises:
        ModelError: `action` has refused, as a UserError.
        NotSaved: any other error of `action`, or of the system.
    """
    failed: Exception | None = None
    said: tuple[type[Exception], str] | None = None
    if rank() == 0:
        try:
            action()
        except (UserError, RunError) as error:
            failed, said = error, (ModelError if isinstance(error, UserError) else NotSaved, str(error))
        except OSError as error:
            failed, said = error, (NotSaved, f"{error.filename or path} can't be written ({reason(error)})")
        except Exception as error:  # noqa: BLE001  other ranks wait for this one, whatever it is
            message = " ".join(str(error).split())
            failed, said = error, (NotSaved, f"{path} can't be written: {type(error).__name__}: {message}")
    then()
    if (said := broadcast_object(said)) is not None:
        cls, words = said
        raise cls(words) from failed
