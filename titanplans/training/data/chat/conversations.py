"""The conversations of .jsonl and .parquet files: which of them a run reads, and a word about the others.

They are tokenised once, as the rows of the files are read, so all that is left out is known before training begins.
"""

from pathlib import Path

import numpy as np

from titanplans.training.data.chat.chat import ChatFormat, Tokens
from titanplans.training.data.corpus.rows import Table
from titanplans.training.data.split import in_split


class Conversations:
    """Documents that are conversations, each a row. Every twentieth row is for validation.

    Raises:
        DataError: one is too long, under truncation = "error".
    """

    def __init__(self, table: Table, files: list[tuple[str, Path]], split: str, chat: ChatFormat) -> None:
        self.files = files
        self._table, self._chat, self._split = table, chat, split
        rows = np.flatnonzero(in_split(np.arange(len(table.lengths)), split))
        self._rows = len(rows)
        silent = table.lengths[rows] == 0
        long = table.lengths[rows] > 4 * (chat.seq_len + 1)
        self._silent, self._long = rows[silent], rows[long]
        gone = {int(row) for row in self._long if self._fitted(int(row)) is None}
        self._dropped = len(gone)
        self._numbers = rows[~silent & ~np.isin(rows, list(gone))]
        # The order of an epoch depends on their number.
        self.identity = {"conversations": len(self._numbers)}

    def __len__(self) -> int:
        return len(self._numbers)

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
        return self._chat.fit(Tokens.from_bytes(self._table.row(row)), self._where(row))

    def _where(self, row: int) -> str:
        return str(self._table.row(row, "where"), "utf-8")

    def _first(self, rows: np.ndarray) -> str:
        tokens = int(self._table.lengths[rows[0]]) // 4
        return f" (the first: {self._where(int(rows[0]))}{f', {tokens:,} tokens' if tokens else ''})"
