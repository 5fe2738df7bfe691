"""`HubDocuments`: a data set of the Hugging Face hub, or a local copy of one, streamed by the `datasets` library.

Nothing is downloaded in advance or indexed. Documents come in the data set's order, shard by shard, and a position in the
data is the state of the library's iterator. `datasets.distributed.split_dataset_by_node` divides the shards among readers.
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
from titanplans.training.data.corpus.rows import RowFormat, quiet_datasets, read_json, read_table
from titanplans.training.data.data_errors import as_data_error

if TYPE_CHECKING:
    import pyarrow
    from datasets import ArrowBasedBuilder, IterableDataset

# The hub's `name:config`, and the split if the name implies one, by torchtitan's names of data sets.
_TORCHTITAN_NAMES = {"c4": ("allenai/c4:en", None), "c4_validation": ("allenai/c4:en", "validation")}


class HubDocuments:
    """Documents of a hub data set in its order; later epochs visit the shards in another order.

    Args:
        name: `owner/name`, `owner/name:config`, or a folder that `datasets.load_dataset` can read.
        path: a local copy to read instead; None: the hub.
        split: the name of one of the data set's splits.
        row_format: converts rows to documents.

    Raises:
        DataError: the data set, the split or a column does not exist, or the hub can't be reached.
    """

    def __init__(self, name: str, path: str | None, split: str, row_format: RowFormat) -> None:
        full_name, implied_split = _TORCHTITAN_NAMES.get(name, (name, None))
        repository, _, config = full_name.partition(":")
        split = implied_split or split
        self._format, self.summary, self.size = row_format, None, None
        self._data, first = _open(name, path or repository, config or None, split, row_format)
        if first is None:
            raise DataError(f"dataset = {name!r}: its split {split!r} holds no document")
        # `_open` lets builders that read files convert the rows. A builder of another kind yields unconverted rows.
        if not row_format.features.keys() <= first.keys():
            row_format.columns(list(first), f"dataset = {name!r}")
            raise DataError(
                f"dataset = {name!r}: its files are not .jsonl, .json or .parquet, the formats of conversations; "
                "convert them"
            )
        self.identity = {
            "dataset": f"{full_name} ({path})" if path else full_name,
            "split": split,
            **row_format.identity,
            "piece_bytes": FRAGMENT_BYTES,
        }
        folder = Path(path or repository).expanduser()
        with as_data_error(f"dataset = {name!r}: {folder} can't be read", "name a readable folder"):
            files = [file for file in sorted(walk(folder)) if file.is_file()]
        self.files = [(file.relative_to(folder).as_posix(), file) for file in files]

    def choose_readers(self, counts: Sequence[int]) -> int:
        """Return the first of `counts` that divides the number of shards, else the last; see `Shuffled.choose_readers`.

        If the shards are not divided evenly, each reader reads all shards and keeps only its documents.
        """
        return next((count for count in counts if self._data.num_shards % count == 0), counts[-1])

    def documents(
        self, epoch: int, reader: int, readers: int, start: list[Any] | None
    ) -> Iterator[tuple[list[Any], Any]]:
        """Yield documents like `Shuffled.documents`. A position has two parts: the library's state before a row, and the
        index of a document in that row.
        """
        from datasets.distributed import split_dataset_by_node

        data = split_dataset_by_node(self._data, rank=reader, world_size=readers)
        data.set_epoch(epoch)
        state, first = start or (None, 0)
        if state is not None:
            data.load_state_dict(state)
        # `iter(data)` would divide the data once more among a loader's workers.
        batches = iter(data.iter(batch_size=1))
        while True:
            with (
                quiet_datasets(),
                as_data_error(f"{self.identity['dataset']} can't be read further"),
            ):
                batch = next(batches, None)
            if batch is None:
                return
            record = {name: batch[name][0] for name in self._format.features}
            for index, fragment in enumerate(self._format.fragments(record)):
                if index >= first and (document := self._format.document(fragment)) is not None:
                    yield [state, index], document
            state, first = data.state_dict(), 0


def _generate_tables(
    builder: "ArrowBasedBuilder", row_format: RowFormat, **shards: Any
) -> Iterator[tuple[Any, "pyarrow.Table"]]:
    """Replace a builder's `_generate_tables`: yield its rows as `row_format` reads them."""
    import pyarrow

    # Without features the library casts nothing. With features it would cast the values of each file to the types of the
    # first file: numbers, booleans and dates would become texts.
    builder.info.features = None
    tables, rows = type(builder)._generate_tables(builder, **shards), 0
    file = next(iter(shards.get("base_files") or shards.get("files") or [builder.dataset_name]))
    while True:
        try:
            with as_data_error(f"{file} can't be read"):
                key, table = next(tables, (None, None))
        except DataError:
            if Path(file).suffix in FORMATS["json"] and Path(file).is_file():
                deque(read_json(file, row_format), maxlen=0)  # raises an error that names the line
            raise
        if table is None:
            return
        records = list(read_table(table, file, rows, row_format))
        yield key, pyarrow.Table.from_pylist(records, pyarrow.schema(row_format.features.items()))
        rows += len(table)


def _open(
    name: str, path: str, config: str | None, split: str, row_format: RowFormat
) -> tuple["IterableDataset", dict[str, list[Any]] | None]:
    """Return the data set and its first row; the row is None if the data set is empty."""
    from datasets import ArrowBasedBuilder, Features, Value, load_dataset_builder

    local = os.path.expanduser(path)
    remedy = (
        "give 'stdlib', a data set of the hub ('owner/name' or 'owner/name:config') with one of its splits as "
        "dataset_split, or 'local' with a dataset_path"
    )
    with quiet_datasets(), as_data_error(f"dataset = {name!r}: can't be opened", remedy):
        # Fails if the hub can't be reached, the data set, config or split does not exist, or a file can't be parsed.
        builder = load_dataset_builder(local if os.path.isdir(local) else path, name=config)
        if isinstance(builder, ArrowBasedBuilder):
            features = {column: Value(kind) for column, kind in row_format.features.items()}
            builder.info.features = Features(features)
            builder._generate_tables = partial(_generate_tables, builder, row_format)  # pyrefly: ignore[bad-assignment]
        data = cast("IterableDataset", builder.as_streaming_dataset(split=split))
        return data, next(iter(data.iter(batch_size=1)), None)
