"""A source of a job as rows: its documents, tokenised and packed, and how far a place is in them.

Which source a row is from is decided in `dataset.py`.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from torchtitan.components.tokenizer import BaseTokenizer

from titanplans.config.sections.data import Data
from titanplans.errors import DataError
from titanplans.text import counted
from titanplans.training.data.chat.chat import ChatFormat, Tokens
from titanplans.training.data.corpus.sources import Source
from titanplans.training.data.packing import Window, pack, pack_best_fit, pack_conversations
from titanplans.training.data.reading import refusing
from titanplans.training.data.streams import SourcePlace


class PackedSource:
    """A source of a job, and how its documents become rows: texts get the tokenizer's bos and eos, where it has them."""

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
        self._packs_whole = chat is None and data.packing == "best_fit"
        self.identity = source.identity | ({} if chat else _packing(data, seq_len))

    def windows(
        self, stream: int, streams: int, start: SourcePlace, *, epochs: int | None
    ) -> Iterator[Window]:
        """Return the rows of a stream from `start` on; of so many epochs, or endlessly."""
        documents, apart = self._documents(stream, streams, start, epochs), self._data.documents == "apart"
        if self._chat is not None:
            # Conversations are not cut: the offset says whether the first is the stream's next.
            return pack_conversations(documents, self._seq_len, start.offset, packing=self._chat.packing)
        if self._data.packing == "cut":
            return pack(documents, self._seq_len, start.offset, apart=apart)
        return pack_best_fit(
            documents,
            self._seq_len,
            start.offset,
            start.packed,
            apart=apart,
            drop=self._data.long_documents == "drop",
        )

    def take_long(self) -> int:
        """Return how many documents were longer than a row since the last call; under best fit alone."""
        number, self._long = self._long, 0
        return number

    def _documents(
        self, stream: int, streams: int, start: SourcePlace, epochs: int | None
    ) -> Iterator[tuple[tuple[int, Any, str], Any]]:
        """Documents from `start` on, each with (epoch, position, digest up to it) and its tokens."""
        epoch, document = start.epoch, start.document
        digest, known = (_NOTHING, False) if document is None else (start.digest, True)
        while True:
            used = False
            for position, text in self.source.documents(epoch, stream, streams, document):
                digest, known = digest if known else _chained(digest, text), False
                tokens: np.ndarray | Tokens = text if self._chat else self._encode(text)
                used = used or self._is_used(len(tokens))
                self._long += self._packs_whole and len(tokens) > self._seq_len + 1
                yield (epoch, position, digest), tokens
            if epochs is not None and epoch + 1 >= epochs:
                return
            if not used and document is None:
                what = "no text"
                if self._chat is not None:
                    what = self._chat.what_is_left_out()
                elif self._data.long_documents == "drop":
                    what = (
                        f'no document within seq_len = {self._seq_len} tokens (data.long_documents = "drop")'
                    )
                raise DataError(
                    f"dataset = {self.source.identity['dataset']!r}: holds {what} for stream {stream} of {streams}; give "
                    "more documents, or train on fewer ranks with fewer num_workers"
                )
            epoch, document, digest = epoch + 1, None, _NOTHING

    def reads_the_same(self, stream: int, streams: int, place: SourcePlace) -> bool:
        """Whether the documents of its epoch up to `place` are those of when it was taken."""
        if place.document is None:
            return True
        wanted = {json.dumps(place.document): place.digest} | dict([place.ahead] if place.ahead else [])
        digest = _NOTHING
        for position, text in self.source.documents(place.epoch, stream, streams, None):
            digest = _chained(digest, text)
            if wanted.pop(json.dumps(position), digest) != digest:
                return False
            if not wanted:
                return True
        return False

    def read(self, streams: int, places: dict[int, SourcePlace]) -> tuple[float, str]:
        """Return how often the source was read, up to the places of its streams, as a number and in words."""
        epoch = max((place.epoch for place in places.values()), default=0)
        if (size := self.source.size) is None:
            return float(epoch), f"in epoch {epoch + 1}"
        read = sum(
            place.epoch * len(range(stream, size, streams)) + place.document + 1
            for stream, place in places.items()
            if place.document is not None
        )
        return read / size, f"{read / size:.2f} epochs, {counted(read, 'document')} of {size:,}"

    def _is_used(self, tokens: int) -> bool:
        """Whether rows use any of a document with this number of tokens."""
        if not self._packs_whole:
            return tokens > 0
        return tokens > 1 and (self._data.long_documents == "cut" or tokens <= self._seq_len + 1)

    def _encode(self, text: str) -> np.ndarray:
        with refusing(f"{self.source.identity['dataset']}: the tokenizer can't read it", "give another"):
            ids = self._tokenizer.encode(text, add_bos=True, add_eos=True)
        return np.asarray(ids, dtype=np.int32)


_NOTHING = "-"
"""The digest of no documents."""


def _chained(digest: str, document: "str | Tokens") -> str:
    """Extend the digest of the documents before `document` by it; "", an unknown digest, stays ""."""
    content = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document.to_bytes()
    return digest and xxhash.xxh3_64(digest.encode() + content).hexdigest()[:12]


def _packing(data: Data, seq_len: int) -> dict[str, Any]:
    """What must be the same for a place to mean the same row; rows that are cut may have another length."""
    if data.packing == "cut":
        return {"packing": "cut"}
    return {"packing": data.packing, "long_documents": data.long_documents, "seq_len": seq_len}
