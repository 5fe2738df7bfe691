"""The sources of a job as rows: each packs its own documents, and a row is one source's.

A mixture says which source each row of a stream is from, by weight: arithmetic on the row's number, the same on every rank.
So weights are shares of the rows, however long the documents of a source are.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from titanplans.config.sections.data import Data, DataSource
from titanplans.errors import DataError
from titanplans.training.data.chat.chat import ChatFormat, Tokens
from titanplans.training.data.corpus.sources import Source, open_source
from titanplans.training.data.packing import Window, pack, pack_best_fit, pack_conversations
from titanplans.training.data.streams import Cursor, SourcePlace
from titanplans.training.job.reading import refusing


class Row(NamedTuple):
    """A window, and the number of the source that it is from."""

    window: Window[Any]
    source: int


class PackedSource:
    """A source of a job, and how its documents become rows.

    Args:
        name: of the source.
        source: its documents.
        data: how they become rows.
        tokenizer: documents get its bos and eos, where it has them.
        seq_len: tokens in a row.
        chat: the documents are conversations.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        data: Data,
        tokenizer: BaseTokenizer,
        seq_len: int,
        chat: ChatFormat | None = None,
    ) -> None:
        self.name, self.source, self._data, self._chat = name, source, data, chat
        self._tokenizer, self._seq_len, self._long = tokenizer, seq_len, 0
        self.identity = source.identity | ({} if chat else _packing(data, seq_len))

    def windows(
        self, stream: int, streams: int, start: SourcePlace, *, infinite: bool
    ) -> Iterator[Window[Any]]:
        """Return the rows of a stream from `start` on; of one epoch, or of all."""
        documents, apart = self._documents(stream, streams, start, infinite), self._data.documents == "apart"
        if self._chat is not None:
            # Conversations are not cut: the offset says whether the first is the stream's next.
            return pack_conversations(documents, self._seq_len, start.offset, packing=self._chat.packing)
        if self._data.packing == "cut":
            return pack(documents, self._seq_len, start.offset, apart=apart)
        return pack_best_fit(
            documents,
            self._seq_len,
            start.offset,
            apart=apart,
            drop=self._data.long_documents == "drop",
            found_long=self._count_long,
        )

    def take_long(self) -> int:
        """Return how many documents were longer than a row since the last call; under best fit alone."""
        number, self._long = self._long, 0
        return number

    def _count_long(self) -> None:
        self._long += 1

    def _documents(
        self, stream: int, streams: int, start: SourcePlace, infinite: bool
    ) -> Iterator[tuple[tuple[int, Any], Any]]:
        """Documents from `start` on, each with (epoch, position) and its tokens."""
        epoch, document = start.epoch, start.document
        while True:
            used = False
            for position, text in self.source.documents(epoch, stream, streams, document):
                tokens: np.ndarray | Tokens = text if self._chat else self._encode(text)
                used = used or self._is_used(len(tokens))
                yield (epoch, position), tokens
            if not infinite:
                return
            if not used and document is None:
                what = self._chat.what_is_left_out() if self._chat else self._what_is_not_used()
                raise DataError(
                    f"dataset = {self.source.identity['dataset']!r}: holds {what} for stream {stream} of {streams}; give "
                    "more documents, or train on fewer ranks with fewer num_workers"
                )
            epoch, document = epoch + 1, None

    def _is_used(self, tokens: int) -> bool:
        """Whether rows take something of a document of so many tokens."""
        if self._chat is not None or self._data.packing == "cut":
            return tokens > 0
        return tokens > 1 and (self._data.long_documents == "cut" or tokens <= self._seq_len + 1)

    def _what_is_not_used(self) -> str:
        if self._data.long_documents == "drop":
            return f'no document within seq_len = {self._seq_len} tokens (data.long_documents = "drop")'
        return "no text"

    def _encode(self, text: str) -> np.ndarray:
        with refusing(f"{self.source.identity['dataset']}: the tokenizer can't read it", "give another"):
            ids = self._tokenizer.encode(text, add_bos=True, add_eos=True)
        return np.asarray(ids, dtype=np.int32)


def open_packed(
    of: DataSource, data: Data, seed: int, tokenizer: BaseTokenizer, seq_len: int
) -> PackedSource:
    """Open a source as the job names it; `seed` is that of the order of its documents, the rest as for `PackedSource`.

    Raises:
        DataError: the source can't be used.
    """
    chat = None
    if of.chat.enable:
        assert isinstance(tokenizer, HuggingFaceTokenizer)  # the trainer's
        chat = ChatFormat(of.chat, tokenizer.tokenizer_path, seq_len)
    return PackedSource(of.title, open_source(of, seed=seed, chat=chat), data, tokenizer, seq_len, chat)


def _packing(data: Data, seq_len: int) -> dict[str, Any]:
    """What must be the same for a place to mean the same row; rows that are cut may have another length."""
    if data.packing == "cut":
        return {"packing": "cut"}
    return {"packing": data.packing, "long_documents": data.long_documents, "seq_len": seq_len}


class Mixture:
    """Which source a row is from.

    Args:
        weights: of the sources.
        since: the row of each stream from which on these weights count.
    """

    def __init__(self, weights: Sequence[float], since: int = 0) -> None:
        numbers = [grain.MapDataset.source([number]).repeat() for number in range(len(weights))]
        self._sources = grain.MapDataset.mix(numbers, list(weights))
        self._since = since

    def source(self, stream: int, row: int) -> int:
        """Return the number of the source of a stream's row; streams are out of step, so that each batch is mixed."""
        return int(self._sources[row - self._since + stream])  # type: ignore[arg-type]


class StreamRows:
    """The rows of a stream, asked for by rising numbers; those between are left to other ranks.

    Args:
        parts: the sources.
        mixture: of them; None: one after another, each once.
        stream: which of `streams`.
        streams: how many there are.
        cursor: where the first row begins.
        infinite: each source begins anew at its end.
    """

    def __init__(
        self,
        parts: Sequence[PackedSource],
        mixture: Mixture | None,
        stream: int,
        streams: int,
        cursor: Cursor,
        *,
        infinite: bool,
    ) -> None:
        self._mixture, self._stream = mixture, stream
        self.cursor = cursor._replace(places=cursor.places or (SourcePlace(),) * len(parts))
        self._windows = [
            part.windows(stream, streams, place, infinite=infinite)
            for part, place in zip(parts, self.cursor.places, strict=True)
        ]

    def row(self, number: int) -> Row | None:
        """Return the row of that number; None if the stream has come to its end before."""
        found = None
        while self.cursor.windows <= number:
            found = self._next()
            if found is None:
                return None
        return found

    def _next(self) -> Row | None:
        wanted: Iterable[int] = range(len(self._windows))
        if self._mixture is not None:
            wanted = [self._mixture.source(self._stream, self.cursor.windows)]
        for source in wanted:
            if (window := next(self._windows[source], None)) is not None:
                epoch, document = window.next_document
                places = list(self.cursor.places)
                places[source] = SourcePlace(epoch, document, window.next_offset)
                self.cursor = Cursor(self.cursor.windows + 1, tuple(places))
                return Row(window, source)
        return None
