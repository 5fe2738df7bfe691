"""Data sets of the Hugging Face hub by name, or a local copy of one, streamed.

Nothing is downloaded ahead and nothing is indexed: documents come in the published order, shard by
shard, and the library's own state says where to go on. How the shards are divided into readers is
`datasets.distributed.split_dataset_by_node`'s. Left alone, the library turns each file's values into the types that the
first file has: numbers, true and dates become texts. So the files are looked at first.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from titanplans.errors import DataError
from titanplans.training.data.corpus.column import FRAGMENT_BYTES
from titanplans.training.data.corpus.local import FORMATS, walk
from titanplans.training.data.corpus.rows import RowFormat, of_table, quietly, records
from titanplans.training.data.reading import refusing

if TYPE_CHECKING:
    import pyarrow
    from datasets import ArrowBasedBuilder, IterableDataset

# torchtitan's names for data sets -> the hub's `name:config`, and the split where the name implies one.
_TORCHTITAN_NAMES = {"c4": ("allenai/c4:en", None), "c4_validation": ("allenai/c4:en", "validation")}


class HubDocuments:
    """Documents of a hub data set, in its published order; later epochs visit its shards in another order.

    Args:
        name: `owner/name`, `owner/name:config`, or a folder that `datasets.load_dataset` can read.
        path: a local copy to read in place of the hub's, or None.
        split: a split of that data set, by its own name.
        row_format: what its rows are read as.

    Raises:
        DataError: the data set, the split or a column isn't there, or the hub can't be reached.
    """

    def __init__(self, name: str, path: str | None, split: str, row_format: RowFormat) -> None:
        known, implied_split = _TORCHTITAN_NAMES.get(name, (name, None))
        repository, _, config = known.partition(":")
        split = implied_split or split
        self._format, self.summary, self.size = row_format, None, None
        self._data, first = _open(name, path or repository, config or None, split, row_format)
        if first is None:
            raise DataError(f"dataset = {name!r}: its split {split!r} holds no document")
        # A builder of its own gives rows as they are.
        if not row_format.features.keys() <= first.keys():
            row_format.columns(list(first), f"dataset = {name!r}")
            raise DataError(
                f"dataset = {name!r}: its files are no .jsonl, .json or .parquet, the formats of conversations; "
                "convert them"
            )
        self.identity = {
            "dataset": f"{known} ({path})" if path else known,
            "split": split,
            **row_format.identity,
            "piece_bytes": FRAGMENT_BYTES,
        }
        folder = Path(path or repository).expanduser()
        with refusing(f"dataset = {name!r}: {folder} can't be read", "name a folder that may be"):
            found = [file for file in sorted(walk(folder)) if file.is_file()]
        self.files = [(file.relative_to(folder).as_posix(), file) for file in found]

    def choose_readers(self, counts: Sequence[int]) -> int:
        """See Shuffled. Where the shards can't be divided evenly, each reader reads all of them and keeps its documents."""
        return next((count for count in counts if self._data.num_shards % count == 0), counts[-1])

    def documents(
        self, epoch: int, reader: int, readers: int, start: list[Any] | None
    ) -> Iterator[tuple[list[Any], Any]]:
        """See Shuffled. A position is the library's state that leads to a row, and which document of that row."""
        from datasets.distributed import split_dataset_by_node

        data = split_dataset_by_node(self._data, rank=reader, world_size=readers)
        data.set_epoch(epoch)
        where, skipped = start or (None, 0)
        if where is not None:
            data.load_state_dict(where)
        # `iter` rather than `__iter__`: that one would divide the data among a loader's workers once more.
        batches = iter(data.iter(batch_size=1))
        while True:
            with (
                quietly(),
                refusing(f"{self.identity['dataset']} can't be read further"),
            ):
                batch = next(batches, None)
            if batch is None:
                return
            record = {name: batch[name][0] for name in self._format.features}
            for number, fragment in enumerate(self._format.fragments(record)):
                if number >= skipped and (document := self._format.document(fragment)) is not None:
                    yield [where, number], document
            where, skipped = data.state_dict(), 0


def _tables(
    builder: "ArrowBasedBuilder", row_format: RowFormat, **shards: Any
) -> Iterator[tuple[Any, "pyarrow.Table"]]:
    """Take the place of a builder's `_generate_tables`: the rows of its files as their format reads them."""
    import pyarrow

    builder.info.features = None  # what is there, and nothing that is made of it
    tables, rows = type(builder)._generate_tables(builder, **shards), 0
    file = next(iter(shards.get("base_files") or shards.get("files") or [builder.dataset_name]))
    while True:
        try:
            with refusing(f"{file} can't be read"):
                key, table = next(tables, (None, None))
        except DataError:
            if Path(file).suffix in FORMATS["json"] and Path(file).is_file():
                deque(records(file, row_format), maxlen=0)  # which names the line
            raise
        if table is None:
            return
        read = list(of_table(table, file, rows, row_format))
        yield key, pyarrow.Table.from_pylist(read, pyarrow.schema(row_format.features.items()))
        rows += len(table)


def _open(
    name: str, path: str, config: str | None, split: str, row_format: RowFormat
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
            features = {column: Value(kind) for column, kind in row_format.features.items()}
            builder.info.features = Features(features)
            builder._generate_tables = partial(_tables, builder, row_format)  # pyrefly: ignore[bad-assignment]
        data = cast("IterableDataset", builder.as_streaming_dataset(split=split))
        return data, next(iter(data.iter(batch_size=1)), None)
