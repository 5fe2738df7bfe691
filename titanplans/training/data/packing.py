"""Documents of tokens packed into rows: cut to `seq_len`, whole ones by best fit, or conversations.

Cut rows are windows of `seq_len + 1` tokens, the last token of one being the first of the next: every token but the very
first is predicted exactly once, from as much context as its window holds. Conversations are not cut, and none is predicted
from another. Pure arithmetic on arrays; no files, no tokenizer, no ranks.

Grain packs by best fit. Its `ConcatThenSplitIterDataset` (0.2.18) does not cut the rows here: its state counts rows from a
document on, so a run that goes on with another `seq_len` would leave tokens out.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from grain import DatasetIterator, IterDataset
from grain.experimental import BestFitPackIterDataset

from titanplans.loss import IGNORED
from titanplans.training.data.chat.chat import Tokens

P = TypeVar("P")
"""The position of a document, of whatever kind the source uses."""


@dataclass(frozen=True)
class Window(Generic[P]):
    """One window, and where the next begins."""

    inputs: np.ndarray
    """`[n]`: n = seq_len but in the last window of a stream of texts, and where conversations leave something over."""

    labels: np.ndarray
    """`[n]`: the token after each input, or -100 where it doesn't count."""

    positions: np.ndarray
    """`[n]`: each input's place in what it may see: its document, or the window."""

    next_document: P
    """The document that holds the next window's first token, the last of this one; the last conversation of this one."""

    next_offset: int
    """That token's place in its document; 1 after a conversation."""

    last_read: P | None = None
    """Of best fit: the last document that was read for this window and those packed with it."""

    packed: Sequence[tuple[int, int]] = ()
    """Of best fit: by which other lengths the documents from `next_document` on have been packed; see `pack_best_fit`."""


def pack(
    documents: Iterable[tuple[P, np.ndarray]], seq_len: int, offset: int = 0, *, apart: bool = False
) -> Iterator[Window[P]]:
    """Cuts the stream of `documents`, pairs of position and tokens, into windows.

    To go on after a window, pass the documents from `next_document` on, and `next_offset`.

    Args:
        documents: positions and tokens `[any length, also 0]`.
        seq_len: inputs in a window.
        offset: where in the first document the first window begins.
        apart: no document's first token is predicted, from another's last; else positions count through the window.

    Yields:
        Full windows; at the end of the documents one shorter window, if anything is left to predict.
    """
    live: deque[tuple[P, np.ndarray]] = deque()
    held = -offset
    for position, tokens in documents:
        live.append((position, tokens))
        held += len(tokens)
        while held > seq_len:
            window = _cut(live, offset, seq_len, apart)
            yield window
            held -= seq_len
            offset = window.next_offset
    if held > 1:
        yield _cut(live, offset, held - 1, apart)


def _cut(live: deque[tuple[P, np.ndarray]], offset: int, n: int, apart: bool) -> Window[P]:
    """The `n + 1` tokens from `offset` on; drops the documents that end before the last of these."""
    parts: list[np.ndarray] = []
    wanted = n + 1
    while True:
        position, tokens = live[0]
        part = tokens[offset : offset + wanted]
        parts.append(part)
        wanted -= len(part)
        if wanted == 0:
            break
        live.popleft()
        offset = 0
    tokens, positions = np.concatenate(parts), np.arange(n + 1)
    if apart:
        positions = np.concatenate([np.arange(len(part)) for part in parts])
    return Window(
        inputs=tokens[:-1],
        labels=np.where(positions[1:] == 0, IGNORED, tokens[1:]),
        positions=positions[:n],
        next_document=position,
        next_offset=offset + len(part) - 1,
    )


ROWS_AT_ONCE = 32
"""Rows that best fit fills at a time: it holds them, and their documents' tokens again after a resume."""


def pack_best_fit(
    documents: Iterable[tuple[P, np.ndarray]],
    seq_len: int,
    offset: int = 0,
    packed: Sequence[tuple[int, int]] = (),
    *,
    apart: bool = True,
    drop: bool = False,
    found_long: Callable[[], None] = lambda: None,
) -> Iterator[Window[P]]:
    """Puts whole documents into rows, each where it leaves the least room.

    To go on after a window, pass the documents from `next_document` on, its `next_offset` and its `packed`; with another
    `seq_len`, pass offset 0 and add the pair of the old length and `next_offset` to `packed`.

    Args:
        documents: positions and tokens; those of less than two are left out.
        seq_len: inputs in a window.
        offset: rows to leave out, and `ROWS_AT_ONCE` times the parts of the first document.
        packed: lengths of rows, and offsets, by which the first documents were packed before, one after another.
        apart: as for `pack`.
        drop: documents longer than a row are left out; else they are cut into rows.
        found_long: called for each such document.
    """
    last_read: Any = None

    def read() -> Iterator[_Pieces[P]]:
        nonlocal last_read
        for last_read, tokens in documents:
            yield last_read, [tokens]

    left = read()
    for length, before in packed:
        left = _left(left, length, before, drop)
    part, rows = divmod(offset, ROWS_AT_ONCE)
    parts = _PartIterator(left, seq_len, part, drop, found_long)
    first, packer = parts.position, _packer(parts, seq_len)
    for row in itertools.islice(packer, rows, None):
        state, n = packer.get_state(), np.count_nonzero(row["inputs_segment_ids"])
        position, part = state["parent"]
        yield Window(
            inputs=row["inputs"][:n],
            labels=row["labels"][:n],
            positions=row["inputs_positions"][:n] if apart else np.arange(n),
            next_document=position,
            next_offset=part * ROWS_AT_ONCE + state["next_row"],
            last_read=last_read,
            packed=packed if position == first else (),
        )


_Pieces = tuple[P, list[np.ndarray]]
"""The position of a document, and its tokens: whole, or as the pieces of it that are left."""


def _packer(parts: "_PartIterator", seq_len: int) -> DatasetIterator[dict[str, np.ndarray]]:
    return iter(
        BestFitPackIterDataset(
            _Parts(parts),
            length_struct={"inputs": seq_len, "labels": seq_len},
            num_packing_bins=ROWS_AT_ONCE,
            shuffle_bins=False,
            padding_struct={"inputs": 0, "labels": IGNORED},
        )
    )


def _left(documents: Iterator[_Pieces[P]], seq_len: int, offset: int, drop: bool) -> Iterator[_Pieces[P]]:
    """What rows of `seq_len` have not used at `offset`: pieces, at the first document's position, then whole documents."""
    part, rows = divmod(offset, ROWS_AT_ONCE)
    parts = _PartIterator(documents, seq_len, part, drop, lambda: None)
    first, packer, pieces = parts.position, _packer(parts, seq_len), []
    for number, row in enumerate(packer):
        if number >= rows:
            of = row["inputs_segment_ids"]
            pieces += [
                np.append(row["inputs"][of == n], row["labels"][of == n][-1]) for n in range(1, of.max() + 1)
            ]
        if packer.get_state()["next_row"] == 0:
            break
    _, part = packer.get_state()["parent"]  # where the rows that follow begin
    yield first, pieces if part == 0 else pieces + parts.parts[part:]
    if part == 0 and parts.position != first:
        yield parts.position, parts.pieces
    yield from documents


class _Parts(IterDataset):
    """Documents as Grain packs them: inputs and their labels, no more than a row of them at a time."""

    def __init__(self, parts: "_PartIterator") -> None:
        super().__init__()
        self._parts = parts

    def __iter__(self) -> "_PartIterator":
        return self._parts


class _PartIterator(DatasetIterator):
    """Its state is the position of a document, and how many parts of it have been given."""

    def __init__(
        self,
        documents: Iterator[_Pieces[Any]],
        seq_len: int,
        part: int,
        drop: bool,
        found_long: Callable[[], None],
    ) -> None:
        super().__init__()
        self._documents, self._seq_len, self._drop, self._found_long = documents, seq_len, drop, found_long
        self.position: Any = None
        self.pieces: list[np.ndarray] = []
        self.parts: list[np.ndarray] = []
        self._read(counts=part == 0)
        self._part = part

    def __next__(self) -> dict[str, np.ndarray]:
        self._find()
        if self._part >= len(self.parts):
            raise StopIteration
        tokens = self.parts[self._part]
        self._part += 1
        return {"inputs": tokens[:-1], "labels": tokens[1:]}

    def _find(self) -> None:
        """Go on to a document that has a part left; at the end stay behind the last one."""
        while self._part >= len(self.parts) and self._read():
            self._part = 0

    def _read(self, *, counts: bool = True) -> bool:
        """Read a document, and cut pieces longer than a row into parts, or leave them out; False if there is none.

        `counts`: those pieces were not counted before.
        """
        following = next(self._documents, None)
        if following is None:
            return False
        self.position, self.pieces = following
        self.parts = []
        for piece in self.pieces:
            if (is_long := len(piece) - 1 > self._seq_len) and counts:
                self._found_long()
            if not (is_long and self._drop):
                firsts = range(0, len(piece) - 1, self._seq_len)
                self.parts += [piece[first : first + self._seq_len + 1] for first in firsts]
        return True

    def get_state(self) -> Any:
        """Return where the next part is."""
        self._find()
        return self.position, self._part

    def set_state(self, state: Any) -> None:
        raise NotImplementedError  # a run goes on by documents from a position on


def pack_conversations(
    documents: Iterable[tuple[P, Tokens]], seq_len: int, offset: int = 0, *, packing: bool = True
) -> Iterator[Window[P]]:
    """Puts conversations into windows, each whole, in their order.

    To go on after a window, pass the documents from `next_document` on, and `next_offset`.

    Args:
        documents: positions and conversations of at most `seq_len + 1` tokens.
        seq_len: inputs in a window.
        offset: 1 to leave out the first conversation, else 0.
        packing: as many as fit; else one in a window.

    Yields:
        Windows with at least one token that counts each.
    """
    parts: list[Tokens] = []
    held, last = 0, None
    for position, tokens in itertools.islice(documents, offset, None):
        if parts and (not packing or held + len(tokens) - 1 > seq_len):
            yield _joined(parts, last)
            parts, held = [], 0
        parts.append(tokens)
        held, last = held + len(tokens) - 1, position
    if parts:
        yield _joined(parts, last)


def _joined(parts: list[Tokens], last: Any) -> Window[Any]:
    return Window(
        inputs=np.concatenate([part.ids[:-1] for part in parts]),
        labels=np.concatenate([np.where(part.counted, part.ids, IGNORED)[1:] for part in parts]),
        positions=np.concatenate([np.arange(len(part) - 1) for part in parts]),
        next_document=last,
        next_offset=1,
    )
