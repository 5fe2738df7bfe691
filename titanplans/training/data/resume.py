"""`resume`: adapt a checkpoint's position in the data to the job's sources, or refuse it; `fingerprint` of files."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from titanplans.errors import DataError
from titanplans.text import show, some
from titanplans.training.data.data_errors import as_data_error
from titanplans.training.data.packed_source import PackedSource
from titanplans.training.data.positions import DataPosition, SourcePosition

VERSION = 2
"""Version of a loader's state."""
_REMEDY = 'keep the checkpoint\'s value, or start the data anew with exclude_from_loading = ["dataloader"] in [checkpoint]'


def resume(
    state: dict[str, Any],
    sources: Sequence[PackedSource],
    weights: dict[str, float],
    identity: dict[str, Any],
) -> tuple[DataPosition, list[str]]:
    """Return the position from which `sources` continue, and lines for the log about what has changed.

    Args:
        state: a loader's state in a checkpoint.
        sources: the job's sources, which are matched with the checkpoint's by name.
        weights: the job's weights, by source name.
        identity: settings of the job, other than the sources' settings, that must equal the checkpoint's.

    Raises:
        DataError: data or settings differ from the checkpoint's, or a text that was read has changed.
    """
    if state.get("version") != VERSION:
        raise DataError(
            "the checkpoint's position in the data was written by another version, which is not supported; start the data "
            'anew with exclude_from_loading = ["dataloader"] in [checkpoint]'
        )
    saved = state["sources"]
    _check_identity(state["identity"], identity)
    if len(saved) == len(sources) == 1:
        # A single source may have another name.
        saved = dict(zip([sources[0].name], saved.values(), strict=True))
    position, notes, saved_names = DataPosition.from_json(state), [], list(saved)

    def positions_of_sources(
        saved_positions: Sequence[SourcePosition],
    ) -> tuple[SourcePosition, ...]:
        return tuple(
            _with_seq_len(saved_positions[saved_names.index(source.name)], saved[source.name], source)
            if source.name in saved
            else SourcePosition()
            for source in sources
        )

    by_reader = {
        reader: reader_position._replace(sources=positions_of_sources(reader_position.sources))
        for reader, reader_position in position.by_reader.items()
    }
    position = replace(position, by_reader=by_reader)
    for index, source in enumerate(sources):
        if source.name in saved:
            notes.append(_check_source(index, source, saved[source.name], position, several=len(sources) > 1))
        elif source.source.choose_readers([position.readers.count]) != position.readers.count:
            raise DataError(
                f"data.sources, {source.name}: it has fewer documents than there are readers in the checkpoint "
                f"({position.readers.count}); give it more documents, or start a new run"
            )
    saved_weights = {name: values["weight"] for name, values in saved.items()}
    # The source of a sequence also depends on the order of the sources.
    if list(saved_weights.items()) != list(weights.items()):
        position = replace(position, weighted_since=position.sequences)
    if saved_weights != weights:
        notes.append(
            f"data.sources have the weights {show(weights)} from here on, and had {show(saved_weights)}"
        )
    return position, [line for line in notes if line]


def _check_source(
    index: int, source: PackedSource, saved: dict[str, Any], position: DataPosition, *, several: bool
) -> str | None:
    """Refuse a source that differs from the saved one; return a line for the log if its files differ."""
    saved_identity, identity = dict(saved["identity"]), dict(source.identity)
    files, saved_hashes = source.source.files, saved["files"]
    hashes = fingerprint(files)
    if files and hashes == saved_hashes:
        saved_identity["dataset"] = identity["dataset"]  # the same files in another folder
    for values in (saved_identity, identity):
        values.pop(_SEQ_LEN, None)  # `_with_seq_len` takes care of it
    suffix = f" of {source.name}" if several else ""
    _check_identity(
        *({f"{key}{suffix}": value for key, value in values.items()} for values in (saved_identity, identity))
    )
    if hashes == saved_hashes:
        return None
    kinds = {
        "have changed": [
            str(path) for name, path in files if saved_hashes.get(name, hashes[name]) != hashes[name]
        ],
        "are new": [str(path) for name, path in files if name not in saved_hashes],
        "can't be found": sorted(saved_hashes.keys() - hashes.keys()),
    }
    changes = ", ".join(f"files {change} ({some(names)})" for change, names in kinds.items() if names)
    if all(
        source.is_unchanged(reader, position.readers.count, reader_position.sources[index])
        for reader, reader_position in position.by_reader.items()
    ):
        return (
            f"since the checkpoint {changes}; the text up to its position is the same, so training continues"
        )
    raise DataError(
        f"since the checkpoint {changes}, which changes the order of the documents or a text that was read; restore the "
        'files, or read the data anew, with exclude_from_loading = ["dataloader"] in [checkpoint]'
    )


_SEQ_LEN = "seq_len"
"""A key in a source's identity. Sources that cut documents lack it, since their position does not depend on the sequence
length."""


def _with_seq_len(position: SourcePosition, saved: dict[str, Any], source: PackedSource) -> SourcePosition:
    """Return a position for sequences of the job's length. Documents that best fit has not used yet are packed again."""
    saved_seq_len = saved["identity"].get(_SEQ_LEN)
    if position.document is None or saved_seq_len == source.identity.get(_SEQ_LEN):
        return position
    return position._replace(offset=0, packed=[*position.packed, (saved_seq_len, position.offset)])


def _check_identity(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise a DataError that names the first setting that differs, with both values."""
    for key in saved | current:
        if saved.get(key) != current.get(key):
            raise DataError(
                f"{key} = {current.get(key)!r}: the checkpoint's data loader had {saved.get(key)!r}; {_REMEDY}"
            )


_BLOCK = 4096
_TOTAL_BLOCKS = 4096
"""Number of blocks that are read from all files together; from each file at least 3 and at most 64."""


def fingerprint(files: Sequence[tuple[str, Path]]) -> dict[str, str]:
    """Return a hash of each file's size and samples, by name.

    The samples are blocks that are spread evenly over a file; a small file is read completely. A change between the
    blocks of a large file is not noticed if the file's size stays the same.

    Args:
        files: pairs of name and path.

    Raises:
        DataError: a file can't be read.
    """
    blocks = max(3, min(64, _TOTAL_BLOCKS // max(1, len(files))))
    return {name: _hash_samples(path, blocks) for name, path in files}


def _hash_samples(path: Path, blocks: int) -> str:
    with as_data_error(f"{path} can't be read"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        is_small, last = size <= blocks * _BLOCK, size - _BLOCK
        digest = xxhash.xxh3_64(str(size).encode())
        for offset in [0] if is_small else [last * i // (blocks - 1) for i in range(blocks)]:
            file.seek(offset)
            digest.update(file.read(blocks * _BLOCK if is_small else _BLOCK))
    return digest.hexdigest()[:12]
