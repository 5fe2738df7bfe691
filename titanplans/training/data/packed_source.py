"""`PackedSource`: the documents of a source, tokenised and packed into sequences. `batches.py` mixes the sources."""

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
from titanplans.training.data.data_errors import as_data_error
from titanplans.training.data.packing import TokenSequence, pack, pack_best_fit, pack_conversations
from titanplans.training.data.positions import SourcePosition


class PackedSource:
    """Packs the documents of a source into sequences. Texts get the tokenizer's bos and eos, if it has them.

    Args:
        name: the source's title.
        source: the source's documents.
        data: the options in [data] about the packing of documents.
        tokenizer: the tokenizer for texts.
        seq_len: tokens per sequence.
        chat: the format of conversations; None: the documents are texts.

    Attributes:
        identity: values that a checkpoint stores. If they are equal in a job, a position means the same sequence in both.
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
        self._is_best_fit = chat is None and data.packing == "best_fit"
        self.identity = source.identity | ({} if chat else _packing_identity(data, seq_len))

    def sequences(
        self, reader: int, readers: int, start: SourcePosition, *, epochs: int | None
    ) -> Iterator[TokenSequence]:
        """Return the sequences of `reader` (of `readers`) from `start` on, for this many epochs; None: unlimited."""
        documents, apart = self._documents(reader, readers, start, epochs), self._data.documents == "apart"
        if self._chat is not None:
            # Conversations are not cut, so the offset is 1 if the first conversation has been used, else 0.
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
        """Return how many documents since the last call were longer than a sequence. Counted only for best fit."""
        count, self._long = self._long, 0
        return count

    def _documents(
        self, reader: int, readers: int, start: SourcePosition, epochs: int | None
    ) -> Iterator[tuple[tuple[int, Any, str], Any]]:
        """Yield the documents from `start` on, as pairs: (epoch, position, digest of the documents up to this one), and
        the tokens."""
        epoch, document = start.epoch, start.document
        # The digest of a position already includes the position's document, which is the first document that is read
        # again.
        digest, includes_document = (_EMPTY_DIGEST, False) if document is None else (start.digest, True)
        while True:
            has_tokens = False
            for position, text in self.source.documents(epoch, reader, readers, document):
                digest = digest if includes_document else _extend_digest(digest, text)
                includes_document = False
                tokens: np.ndarray | Tokens = text if self._chat else self._encode(text)
                has_tokens = has_tokens or self._is_used(len(tokens))
                self._long += self._is_best_fit and len(tokens) > self._seq_len + 1
                yield (epoch, position, digest), tokens
            if epochs is not None and epoch + 1 >= epochs:
                return
            if not has_tokens and document is None:
                # A complete epoch had no token. Without an error the loop would never end.
                missing = "no text"
                if self._chat is not None:
                    missing = self._chat.describe_exclusions()
                elif self._data.long_documents == "drop":
                    missing = (
                        f'no document within seq_len = {self._seq_len} tokens (data.long_documents = "drop")'
                    )
                raise DataError(
                    f"dataset = {self.source.identity['dataset']!r}: holds {missing} for reader {reader} of {readers}; give "
                    "more documents, or train on fewer ranks with fewer num_workers"
                )
            epoch, document, digest = epoch + 1, None, _EMPTY_DIGEST

    def is_unchanged(self, reader: int, readers: int, position: SourcePosition) -> bool:
        """Return whether the documents of the epoch up to `position` are the same as when the position was saved."""
        if position.document is None:
            return True
        expected = {json.dumps(position.document): position.digest}
        expected |= dict([position.ahead] if position.ahead else [])
        digest = _EMPTY_DIGEST
        for document, text in self.source.documents(position.epoch, reader, readers, None):
            digest = _extend_digest(digest, text)
            if expected.pop(json.dumps(document), digest) != digest:
                return False
            if not expected:
                return True
        return False

    def epochs_read(self, readers: int, positions: dict[int, SourcePosition]) -> tuple[float, str]:
        """Return how often the source was read, as a number and in words, given the positions of its readers."""
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
        """Return whether any token of a document with this many tokens goes into a sequence."""
        if not self._is_best_fit:
            return tokens > 0
        return tokens > 1 and (self._data.long_documents == "cut" or tokens <= self._seq_len + 1)

    def _encode(self, text: str) -> np.ndarray:
        with as_data_error(f"{self.source.identity['dataset']}: the tokenizer can't read it", "give another"):
            ids = self._tokenizer.encode(text, add_bos=True, add_eos=True)
        return np.asarray(ids, dtype=np.int32)


_EMPTY_DIGEST = "-"
"""The digest before the first document of an epoch."""


def _extend_digest(digest: str, document: "str | Tokens") -> str:
    """Return `digest`, extended by `document`; an unknown digest, "", stays unknown."""
    content = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document.to_bytes()
    return digest and xxhash.xxh3_64(digest.encode() + content).hexdigest()[:12]


def _packing_identity(data: Data, seq_len: int) -> dict[str, Any]:
    """Return the settings of packing that must be equal for a position to mean the same sequence."""
    if data.packing == "cut":  # a position is an offset in a document, whatever the sequence length
        return {"packing": "cut"}
    return {"packing": data.packing, "long_documents": data.long_documents, "seq_len": seq_len}
