"""Whether a job can go on from the place in the data that a checkpoint holds, and where that is for its sources of today."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from titanplans.errors import DataError
from titanplans.text import show, some
from titanplans.training.data.mixture import PackedSource
from titanplans.training.data.reading import refusing
from titanplans.training.data.streams import DataPosition, SourcePlace

VERSION = 2
"""Of a loader's state."""
_REMEDY = 'keep the checkpoint\'s, or start the data anew with exclude_from_loading = ["dataloader"] in [checkpoint]'


def resume(
    state: dict[str, Any], parts: Sequence[PackedSource], weights: dict[str, float], identity: dict[str, Any]
) -> tuple[DataPosition, list[str]]:
    """Return the place where `parts` go on, and lines for the log about changes.

    Args:
        state: what a loader's `state_dict` holds.
        parts: the sources of today; they are those of the checkpoint by their names, as their `weights`.
        identity: the settings that must be the same, without the sources' own.

    Raises:
        DataError: the data are others, or by other settings; or a text has changed that was read.
    """
    if state.get("version") != VERSION:
        raise DataError(
            f"the checkpoint's place in the data was written by another version, and is not read; {_REMEDY}"
        )
    saved = state["sources"]
    _check_identity(state["identity"], identity)
    if len(saved) == len(parts) == 1:
        saved = dict(zip([parts[0].name], saved.values(), strict=True))
    place, said, there = DataPosition.from_json(state), [], list(saved)

    def of_today(before: Sequence[SourcePlace]) -> tuple[SourcePlace, ...]:
        return tuple(
            _at_length(before[there.index(part.name)], saved[part.name], part)
            if part.name in saved
            else SourcePlace()
            for part in parts
        )

    cursors = {s: cursor._replace(places=of_today(cursor.places)) for s, cursor in place.cursors.items()}
    place = replace(place, cursors=cursors)
    for number, part in enumerate(parts):
        if part.name in saved:
            said.append(_check_source(number, part, saved[part.name], place, several=len(parts) > 1))
        elif part.source.choose_streams([place.streams.count]) != place.streams.count:
            raise DataError(
                f"data.sources, {part.name}: it has fewer documents than the {place.streams.count} streams into which the "
                "checkpoint divides the data; give it more, or start a new run"
            )
    before = {name: values["weight"] for name, values in saved.items()}
    if list(before.items()) != list(weights.items()):
        place = replace(place, weighted_since=place.sequences)
    if before != weights:
        said.append(f"data.sources have the weights {show(weights)} from here on, and had {show(before)}")
    return place, [line for line in said if line]


def _check_source(
    number: int, part: PackedSource, saved: dict[str, Any], place: DataPosition, *, several: bool
) -> str | None:
    """Refuse a source that is not the saved one; return a line for the log about its files."""
    before, now, paths, then = dict(saved["identity"]), dict(part.identity), part.source.files, saved["files"]
    current = fingerprint(paths)
    if paths and current == then:  # the same files, wherever they lie now
        before["dataset"] = now["dataset"]
    for of in (before, now):
        of.pop(_LENGTH, None)
    named = f" of {part.name}" if several else ""
    _check_identity(*({f"{key}{named}": value for key, value in of.items()} for of in (before, now)))
    if current == then:
        return None
    kinds = {
        "have changed": [str(path) for name, path in paths if then.get(name, current[name]) != current[name]],
        "are new": [str(path) for name, path in paths if name not in then],
        "can't be found": sorted(then.keys() - current.keys()),
    }
    found = ", ".join(f"files {what} ({some(names)})" for what, names in kinds.items() if names)
    if all(
        part.reads_the_same(stream, place.streams.count, cursor.places[number])
        for stream, cursor in place.cursors.items()
    ):
        return f"since the checkpoint {found}; what was read before its place is the same, so training goes on from there"
    raise DataError(
        f"since the checkpoint {found}, and with that the order of the documents or a text that has been read: restore the "
        'files, or give up the place, and read the data anew, by exclude_from_loading = ["dataloader"] in [checkpoint]'
    )


_LENGTH = "seq_len"


def _at_length(place: SourcePlace, saved: dict[str, Any], part: PackedSource) -> SourcePlace:
    """The place by rows of today's length: whole documents that were packed by another are packed anew."""
    length = saved["identity"].get(_LENGTH)
    if place.document is None or length == part.identity.get(_LENGTH):
        return place
    return place._replace(offset=0, packed=[*place.packed, (length, place.offset)])


def _check_identity(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse a checkpoint of other data or settings; the `DataError` names the first that differs, with both values."""
    for key in saved | current:
        if saved.get(key) != current.get(key):
            raise DataError(
                f"{key} = {current.get(key)!r}: the checkpoint's data loader had {saved.get(key)!r}; {_REMEDY}"
            )


_BLOCK = 4096
_BLOCKS = 4096
"""Read of all files together, but at least three of each and at most 64."""


def fingerprint(files: Sequence[tuple[str, Path]]) -> dict[str, str]:
    """Return a hash of size and samples by the name of each file; `files` are pairs of name and path.

    A file is sampled in blocks spread over it, its first and last among them; one that is no larger is read whole. A change
    between the blocks of a large file that leaves its size alone is not seen.

    Raises:
        DataError: one can't be read.
    """
    blocks = max(3, min(64, _BLOCKS // max(1, len(files))))
    return {name: _sample(path, blocks) for name, path in files}


def _sample(path: Path, blocks: int) -> str:
    """The hash of a file's size and blocks."""
    with refusing(f"{path} can't be read"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        whole, last = size <= blocks * _BLOCK, size - _BLOCK
        digest = xxhash.xxh3_64(str(size).encode())
        for place in [0] if whole else [last * i // (blocks - 1) for i in range(blocks)]:
            file.seek(place)
            digest.update(file.read(blocks * _BLOCK if whole else _BLOCK))
    return digest.hexdigest()[:12]
