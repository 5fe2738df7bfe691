"""What a saved position in the data belongs to, and the refusal to go on with anything else."""

from typing import Any

from titanplans.errors import DataError

_REMEDY = (
    "go on with the checkpoint's, or start the data anew with "
    'exclude_from_loading = ["dataloader"] in [checkpoint]'
)


def check_identity(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raises DataError, naming the first setting that differs and both its values."""
    for key in saved | current:
        if saved.get(key) != current.get(key):
            raise DataError(
                f"{key} = {current.get(key)!r}: the checkpoint's data loader had {saved.get(key)!r}; {_REMEDY}"
            )


def degree_changed(saved: int, current: int) -> DataError:
    """The error for a checkpoint that was written at another data-parallel degree."""
    return DataError(
        f"data-parallel degree {current}: the checkpoint's data loader had {saved}, and the places of {saved} "
        f"ranks in the data can't be dealt out to {current}; {_REMEDY}"
    )


def rank_missing(rank_id: str) -> DataError:
    """The error for a checkpoint without the state of this rank's loader."""
    return DataError(f"the checkpoint holds no data loader state for {rank_id}; {_REMEDY}")
