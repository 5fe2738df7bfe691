"""The conversations of .jsonl and .parquet files: which of them a run reads, and a word about the others.

They are tokenised once, as the rows of the files are read, so all that is left out is known before training begins.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titanplans.training.data.chat.chat import ChatFormat, Tokens
from titanplans.training.data.corpus.rows import RowDocuments


class Conversations(RowDocuments):
    """Documents that are conversations, each a row.

    Raises:
        DataError: one is too long, under truncation = "error".
    """

    def __init__(self, root: Path, files: Sequence[Path], file_format: str, split: str, chat: ChatFormat):
        from pyarrow.compute import (
            binary_length,  # pyrefly: ignore[missing-module-attribute]  made as it is imported
        )

        super().__init__(root, files, file_format, split, chat)
        self._chat, self._split = chat, split
        self._lengths = binary_length(self._columns["conversation"]).to_numpy() // 4
        lengths = self._lengths[self._numbers]
        self._silent = self._numbers[lengths == 0]
        self._long = self._numbers[lengths > chat.seq_len + 1]
        gone = [row for row in map(int, self._long) if self._fitted(row) is None]
        self._rows, self._dropped = len(self._numbers), len(gone)
        self._numbers = self._numbers[(lengths > 0) & ~np.isin(self._numbers, gone)]
        # The order of an epoch depends on their number.
        self.identity |= {"conversations": len(self._numbers)}

    def document(self, i: int) -> Tokens:
        """Conversation `i`."""
        tokens = self._fitted(int(self._numbers[i]))
        assert tokens is not None
        return tokens

    @property
    def summary(self) -> str:
        """Return in words how many conversations there are, and how many are left out or cut, with the first of each."""
        said = [f"{len(self):,} of {self._rows:,} conversations are read (dataset_split = {self._split!r})"]
        if len(self._silent):
            said.append(
                f"left out, as nothing in them counts: {len(self._silent):,}{self._first(self._silent)}"
            )
        if kept := len(self._long) - self._dropped:
            said.append(f"cut to seq_len = {self._chat.seq_len}: {kept:,}")
        if self._dropped:
            said.append(f"left out for their length: {self._dropped:,}")
        if len(self._long):
            said[-1] += self._first(self._long)
        return "; ".join(said)

    def _fitted(self, row: int) -> Tokens | None:
        kept = self._record(row)
        return self._chat.fit(Tokens.from_bytes(kept["conversation"]), kept["where"])

    def _first(self, rows: np.ndarray) -> str:
        tokens = int(self._lengths[rows[0]])
        where = self._record(int(rows[0]))["where"]
        return f" (the first: {where}{f', {tokens:,} tokens' if tokens else ''})"
