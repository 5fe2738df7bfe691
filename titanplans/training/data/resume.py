"""Whether a job can go on from the position in the data that a checkpoint holds, and where that is in today's sources."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from titanplans.errors import DataError
from titanplans.text import show, some
from titanplans.training.data.packed_source import PackedSource
from titanplans.training.data.positions import DataPosition, SourcePosition
from titanplans.training.data.reading import refusing

VERSION = 2
"""Of a loader's state."""
_REMEDY = 'keep the checkpoint\'s, or start the data anew with exclude_from_loading = ["dataloader"] in [checkpoint]'


def resume(
    state: dict[str, Any],
    sources: Sequence[PackedSource],
    weights: dict[str, float],
    identity: dict[str, Any],
) -> tuple[DataPosition, list[str]]:
    """Return the position where `sources` go on, and lines for the log about changes.

    Args:
        state: what a loader's `state_dict` holds.
        sources: the sources of today; they are those of the checkpoint by their names, as their `weights`.
        identity: the settings that must be the same, without the sources' own.

    Raises:
        DataError: the data are others, or by other settings; or a text has changed that was read.
    """
    if state.get("version") != VERSION:
        raise DataError(
            f"the checkpoint's position in the data was written by another version, and is not read; {_REMEDY}"
        )
    saved = state["sources"]
    _check_identity(state["identity"], identity)
    if len(saved) == len(sources) == 1:
        saved = dict(zip([sources[0].name], saved.values(), strict=True))
    position, notes, there = DataPosition.from_json(state), [], list(saved)

    def of_today(before: Sequence[SourcePosition]) -> tuple[SourcePosition, ...]:
        return tuple(
            _at_length(before[there.index(source.name)], saved[source.name], source)
            if source.name in saved
            else SourcePosition()
            for source in sources
        )

    by_reader = {
        reader: own._replace(sources=of_today(own.sources)) for reader, own in position.by_reader.items()
    }
    position = replace(position, by_reader=by_reader)
    for at, source in enumerate(sources):
        if source.name in saved:
            notes.append(_check_source(at, source, saved[source.name], position, several=len(sources) > 1))
        elif source.source.choose_readers([position.readers.count]) != position.readers.count:
            raise DataError(
                f"data.sources, {source.name}: it has fewer documents than the {position.readers.count} readers among "
                "which the checkpoint divides the data; give it more, or start a new run"
            )
    before = {name: values["weight"] for name, values in saved.items()}
    if list(before.items()) != list(weights.items()):
        position = replace(position, weighted_since=position.sequences)
    if before != weights:
        notes.append(f"data.sources have the weights {show(weights)} from here on, and had {show(before)}")
    return position, [line for line in notes if line]


def _check_source(
    at: int, source: PackedSource, saved: dict[str, Any], position: DataPosition, *, several: bool
) -> str | None:
    """Refuse a source that is not the saved one; return a line for the log about its files."""
    before, now, files, then = (
        dict(saved["identity"]),
        dict(source.identity),
        source.source.files,
        saved["files"],
    )
    current = fingerprint(files)
    if files and current == then:  # the same files, wherever they lie now
        before["dataset"] = now["dataset"]
    for of in (before, now):
        of.pop(_LENGTH, None)
    named = f" of {source.name}" if several else ""
    _check_identity(*({f"{key}{named}": value for key, value in of.items()} for of in (before, now)))
    if current == then:
        return None
    kinds = {
        "have changed": [str(path) for name, path in files if then.get(name, current[name]) != current[name]],
        "are new": [str(path) for name, path in files if name not in then],
        "can't be found": sorted(then.keys() - current.keys()),
    }
    found = ", ".join(f"files {what} ({some(names)})" for what, names in kinds.items() if names)
    if all(
        source.reads_the_same(reader, position.readers.count, own.sources[at])
        for reader, own in position.by_reader.items()
    ):
        return f"since the checkpoint {found}; what was read before its position is the same, so training goes on from there"
    raise DataError(
        f"since the checkpoint {found}, and with that the order of the documents or a text that has been read: restore the "
        'files, or give up the position, and read the data anew, by exclude_from_loading = ["dataloader"] in [checkpoint]'
    )


_LENGTH = "seq_len"


def _at_length(position: SourcePosition, saved: dict[str, Any], source: PackedSource) -> SourcePosition:
    """Return the position by sequences of today's length: whole documents that were packed by another are packed anew."""
    length = saved["identity"].get(_LENGTH)
    if position.document is None or length == source.identity.get(_LENGTH):
        return position
    return position._replace(offset=0, packed=[*position.packed, (length, position.offset)])


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
        for position in [0] if whole else [last * i // (blocks - 1) for i in range(blocks)]:
            file.seek(position)
            digest.update(file.read(blocks * _BLOCK if whole else _BLOCK))
    return digest.hexdigest()[:12]
