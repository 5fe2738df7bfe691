"""The windows of one data-parallel rank, as an iterable that can begin at any place of a run.

No token is ever saved: a resumed run tokenises the document again in which a stream stopped.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer

from titanplans.errors import DataError
from titanplans.training.data.chat.chat import ChatFormat, Tokens
from titanplans.training.data.corpus.sources import Source
from titanplans.training.data.packing import Window, pack, pack_conversations
from titanplans.training.data.streams import BatchSlice, Cursor, DataPosition
from titanplans.training.job.reading import refusing


class StepBatch(NamedTuple):
    """A rank's share of one global batch, each tensor `[share, seq_len]` int64."""

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    cursors: dict[int, Cursor]
    """Where the streams that it was cut from go on."""


class PackedText(IterableDataset):
    """The shares of one rank, one after another; a loader's worker makes every n-th.

    Args:
        source: the corpus.
        tokenizer: torchtitan's; documents get its bos and eos, where it has them.
        seq_len: tokens in a sequence.
        share: this rank's.
        start: where the next `iter` begins.
        chat: the documents are conversations.
        infinite: go on with the next epoch for ever; else end after one pass over one stream, in which every token is
            predicted once on one rank, and the last global batch is filled up with ignored labels.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: BaseTokenizer,
        seq_len: int,
        share: BatchSlice,
        start: DataPosition,
        *,
        chat: ChatFormat | None = None,
        infinite: bool,
    ) -> None:
        self._source, self._tokenizer, self._seq_len, self._share = source, tokenizer, seq_len, share
        self._chat, self._infinite = chat, infinite
        self.beginning = self.start = start

    def __iter__(self) -> Iterator[StepBatch | DataError]:
        start, self.start = self.start, self.beginning
        worker = get_worker_info()
        return self._batches(start, worker.id if worker is not None else 0)

    def _batches(self, start: DataPosition, worker: int) -> Iterator[StepBatch | DataError]:
        readers: dict[int, _Reader] = {}
        for step in itertools.count(worker, self._share.workers):
            windows, opened = [], {}
            try:
                for sequence in self._share.of(start.sequences, step):
                    stream, number = start.streams.place(sequence)
                    if stream not in readers:
                        readers[stream] = self._reader(stream, start)
                    windows.append(readers[stream].window(number))
                    opened[stream] = readers[stream]
            except DataError as error:
                yield error  # a worker's own exceptions come out with its traceback in the message
                return
            if None in windows and self._is_over(start, step, readers[0]):
                return
            yield self._batch(windows, {stream: reader.cursor for stream, reader in opened.items()})

    def _is_over(self, start: DataPosition, step: int, reader: "_Reader") -> bool:
        """Whether a pass, which has one stream, came to its end before this step."""
        return start.sequences + step * self._share.global_batch >= reader.cursor.windows

    def _reader(self, stream: int, start: DataPosition) -> "_Reader":
        cursor = start.cursors.get(stream, Cursor())
        documents = self._documents(stream, start.streams.count, cursor)
        # Of conversations, which are not cut, the offset says whether the first is the stream's next.
        cut: Any = partial(pack_conversations, packing=self._chat.packing) if self._chat else pack
        return _Reader(cut(documents, self._seq_len, cursor.offset), cursor)

    def _documents(
        self, stream: int, streams: int, start: Cursor
    ) -> Iterator[tuple[tuple[int, Any], np.ndarray | Tokens]]:
        """Documents of all epochs from `start` on, each with (epoch, position) and its tokens."""
        epoch, document = start.epoch, start.document
        while True:
            total = 0
            for position, text in self._source.documents(epoch, stream, streams, document):
                tokens = text if self._chat else self._encode(text)
                total += len(tokens)
                yield (epoch, position), tokens
            if not self._infinite:
                return
            if total == 0 and document is None:
                what = self._chat.what_is_left_out() if self._chat else "no text"
                raise DataError(
                    f"dataset = {self._source.identity['dataset']!r}: holds {what} for stream {stream} of {streams}; give "
                    "more documents, or train on fewer ranks with fewer num_workers"
                )
            epoch, document = epoch + 1, None

    def _encode(self, text: str) -> np.ndarray:
        with refusing(f"{self._source.identity['dataset']}: the tokenizer can't read it", "give another"):
            ids = self._tokenizer.encode(text, add_bos=True, add_eos=True)
        return np.asarray(ids, dtype=np.int32)

    def _batch(self, windows: list[Window | None], cursors: dict[int, Cursor]) -> StepBatch:
        shape = len(windows), self._seq_len
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        positions = np.tile(np.arange(self._seq_len), (len(windows), 1))
        for row, window in enumerate(windows):
            if window is not None:
                n = len(window.positions)
                tokens[row, :n], labels[row, :n] = window.inputs, window.labels
                positions[row, :n] = window.positions
                positions[row, n:] = np.arange(self._seq_len - n)
        return StepBatch(
            torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(labels), cursors
        )


class _Reader:
    """A stream's windows, asked for by rising numbers; those between are left to other ranks."""

    def __init__(self, windows: Iterator[Window], cursor: Cursor) -> None:
        self._windows, self.cursor = windows, cursor

    def window(self, number: int) -> Window | None:
        """Return the window of that number; None if the stream has come to its end before."""
        window = None
        while self.cursor.windows <= number:
            window = next(self._windows, None)
            if window is None:
                return None
            epoch, document = window.next_document
            self.cursor = Cursor(epoch, document, window.next_offset, self.cursor.windows + 1)
        return window
