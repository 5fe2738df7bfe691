"""Data sets of the Hugging Face hub by name, or a local copy of one, read as a stream.

Nothing is downloaded ahead and nothing is indexed: documents come in the published order, shard by
shard, and the library's own state says where to go on. How the shards are divided into streams is
`datasets.distributed.split_dataset_by_node`'s. Left alone, the library turns each file's values into the types that the
first file has: numbers, true and dates become texts. So what it reads is looked at before it does.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from titanplans.errors import DataError
from titanplans.training.data.local import FORMATS, walk
from titanplans.training.data.pieces import PIECE_BYTES, pieces
from titanplans.training.data.rows import as_text, check_column, quietly, text_table, texts
from titanplans.training.reading import refusing

if TYPE_CHECKING:
    import pyarrow
    from datasets import ArrowBasedBuilder, IterableDataset

# torchtitan's names for data sets -> the hub's `name:config`, and the split where the name implies one.
_TORCHTITAN_NAMES = {"c4": ("allenai/c4:en", None), "c4_validation": ("allenai/c4:en", "validation")}


class Stream:
    """Documents of a hub data set, in its published order; later epochs visit its shards in another order.

    Args:
        name: `owner/name`, `owner/name:config`, or a folder that `datasets.load_dataset` can read.
        path: a local copy to read in place of the hub's, or None.
        split: a split of that data set, by its own name.
        text_column: the column that holds the text.

    Raises:
        DataError: the data set, the split or the column isn't there, or the hub can't be reached.
    """

    def __init__(self, name: str, path: str | None, split: str, text_column: str) -> None:
        known, implied_split = _TORCHTITAN_NAMES.get(name, (name, None))
        repository, _, config = known.partition(":")
        split = implied_split or split
        self._text_column = text_column
        self._data, first = _open(name, path or repository, config or None, split, text_column)
        if first is None:
            raise DataError(f"dataset = {name!r}: its split {split!r} holds no document")
        check_column(list(first), text_column, f"dataset = {name!r}")
        self.identity = {
            "dataset": f"{known} ({path})" if path else known,
            "split": split,
            "text_column": text_column,
            "piece_bytes": PIECE_BYTES,
        }
        folder = Path(path or repository).expanduser()
        with refusing(f"dataset = {name!r}: {folder} can't be read", "name a folder that may be"):
            found = [file for file in sorted(walk(folder)) if file.is_file()]
        self.files = [(file.relative_to(folder).as_posix(), file) for file in found]

    def choose_streams(self, counts: Sequence[int]) -> int:
        """See Source. Where the shards can't be divided evenly, each stream reads all of them and keeps its documents."""
        return next((count for count in counts if self._data.num_shards % count == 0), counts[-1])

    def documents(
        self, epoch: int, stream: int, streams: int, start: list[Any] | None
    ) -> Iterator[tuple[list[Any], str]]:
        """See Source. A position is the library's state that leads to a row, and the piece of that row."""
        from datasets.distributed import split_dataset_by_node

        data = split_dataset_by_node(self._data, rank=stream, world_size=streams)
        data.set_epoch(epoch)
        where, skipped = start or (None, 0)
        if where is not None:
            data.load_state_dict(where)
        # `iter` rather than `__iter__`: that one would divide the stream among a loader's workers once more.
        batches = iter(data.iter(batch_size=1))
        while True:
            with (
                quietly(),
                refusing(
                    f"{self.identity['dataset']} can't be read further", "repair the file or leave it out"
                ),
            ):
                batch = next(batches, None)
            if batch is None:
                return
            text = as_text(batch[self._text_column][0], self._text_column, "a row")
            for piece, document in enumerate(pieces(text)):
                if piece >= skipped:
                    yield [where, piece], document
            where, skipped = data.state_dict(), 0


@dataclass(frozen=True)
class _Tables:
    """Takes the place of a builder's `_generate_tables`: the texts of its files as they are there, without other columns.

    Raises:
        DataError: a file can't be read, or a row of it has no text; names both.
    """

    builder: "ArrowBasedBuilder"
    text_column: str

    def __call__(self, **shards: Any) -> Iterator[tuple[Any, "pyarrow.Table"]]:
        self.builder.info.features = None  # what is there, and nothing that is made of it
        tables = type(self.builder)._generate_tables(self.builder, **shards)
        file = next(iter(shards.get("base_files") or shards.get("files") or [self.builder.dataset_name]))
        rows = 0
        while True:
            try:
                with refusing(f"{file} can't be read", "repair the file or leave it out"):
                    key, table = next(tables, (None, None))
            except DataError:
                if Path(file).suffix in FORMATS["json"] and Path(file).is_file():
                    deque(texts(file, self.text_column), maxlen=0)  # which names the line
                raise
            if table is None:
                return
            yield key, text_table(table, self.text_column, file, rows)
            rows += len(table)


def _open(
    name: str, path: str, config: str | None, split: str, text_column: str
) -> tuple["IterableDataset", dict[str, list[Any]] | None]:
    """The data set and its first document, None if there is none."""
    from datasets import ArrowBasedBuilder, Features, Value, load_dataset_builder

    local = os.path.expanduser(path)
    remedy = (
        "give 'stdlib', a data set of the hub ('owner/name' or 'owner/name:config') and one of its splits as dataset_split, "
        "or 'local' with a dataset_path"
    )
    with quietly(), refusing(f"dataset = {name!r}: can't be opened", remedy):
        # No way to the hub; no such data set, config or split; a file that can't be parsed.
        builder = load_dataset_builder(local if os.path.isdir(local) else path, name=config)
        if isinstance(builder, ArrowBasedBuilder):
            builder.info.features = Features({text_column: Value("string")})
            builder._generate_tables = _Tables(builder, text_column)  # pyrefly: ignore[bad-assignment]
        data = cast("IterableDataset", builder.as_streaming_dataset(split=split))
        return data, next(iter(data.iter(batch_size=1)), None)
