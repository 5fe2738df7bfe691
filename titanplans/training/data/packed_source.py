"""A source of a job as sequences: its documents, tokenised and packed, and how far a position is in them.

Which source a sequence is from is decided in `batches.py`.
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
from titanplans.training.data.packing import TokenSequence, pack, pack_best_fit, pack_conversations
from titanplans.training.data.positions import SourcePosition
from titanplans.training.data.reading import refusing


class PackedSource:
    """A source of a job, and how its documents become sequences: texts get the tokenizer's bos and eos, if it has them."""

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

    def sequences(
        self, reader: int, readers: int, start: SourcePosition, *, epochs: int | None
    ) -> Iterator[TokenSequence]:
        """Return the sequences of a reader from `start` on; of so many epochs, or endlessly."""
        documents, apart = self._documents(reader, readers, start, epochs), self._data.documents == "apart"
        if self._chat is not None:
            # Conversations are not cut: the offset says whether the first is the reader's next.
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
        """Return how many documents were longer than a sequence since the last call; under best fit alone."""
        count, self._long = self._long, 0
        return count

    def _documents(
        self, reader: int, readers: int, start: SourcePosition, epochs: int | None
    ) -> Iterator[tuple[tuple[int, Any, str], Any]]:
        """Yield documents from `start` on, each with (epoch, its position, digest up to it) and its tokens."""
        epoch, document = start.epoch, start.document
        digest, is_known = (_NOTHING, False) if document is None else (start.digest, True)
        while True:
            is_used = False
            for position, text in self.source.documents(epoch, reader, readers, document):
                digest, is_known = digest if is_known else _chained(digest, text), False
                tokens: np.ndarray | Tokens = text if self._chat else self._encode(text)
                is_used = is_used or self._is_used(len(tokens))
                self._long += self._packs_whole and len(tokens) > self._seq_len + 1
                yield (epoch, position, digest), tokens
            if epochs is not None and epoch + 1 >= epochs:
                return
            if not is_used and document is None:
                what = "no text"
                if self._chat is not None:
                    what = self._chat.what_is_left_out()
                elif self._data.long_documents == "drop":
                    what = (
                        f'no document within seq_len = {self._seq_len} tokens (data.long_documents = "drop")'
                    )
                raise DataError(
                    f"dataset = {self.source.identity['dataset']!r}: holds {what} for reader {reader} of {readers}; give "
                    "more documents, or train on fewer ranks with fewer num_workers"
                )
            epoch, document, digest = epoch + 1, None, _NOTHING

    def reads_the_same(self, reader: int, readers: int, position: SourcePosition) -> bool:
        """Whether the documents of its epoch up to `position` are those of when it was taken."""
        if position.document is None:
            return True
        wanted = {json.dumps(position.document): position.digest}
        wanted |= dict([position.ahead] if position.ahead else [])
        digest = _NOTHING
        for document, text in self.source.documents(position.epoch, reader, readers, None):
            digest = _chained(digest, text)
            if wanted.pop(json.dumps(document), digest) != digest:
                return False
            if not wanted:
                return True
        return False

    def epochs_read(self, readers: int, positions: dict[int, SourcePosition]) -> tuple[float, str]:
        """Return how often the source was read, up to the positions of its readers, as a number and in words."""
        epoch = max((position.epoch for position in positions.values()), default=0)
        if (size := self.source.size) is None:
            return float(epoch), f"in epoch {epoch + 1}"
        documents = sum(
            position.epoch * len(range(reader, size, readers)) + position.document + 1
            for reader, position in positions.items()
            if position.document is not None
        )
        epochs = documents / size
        return epochs, f"{epochs:.2f} epochs, {counted(documents, 'document')} of {size:,}"

    def _is_used(self, tokens: int) -> bool:
        """Whether sequences use any of a document with so many tokens."""
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
    """Return what must be equal for a position to mean the same sequence; those that are cut may have another length."""
    if data.packing == "cut":
        return {"packing": "cut"}
    return {"packing": data.packing, "long_documents": data.long_documents, "seq_len": seq_len}
