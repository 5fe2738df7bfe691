"""Documents of tokens packed into rows: cut to `seq_len`, whole ones by best fit, or conversations.

Cut rows are windows of `seq_len + 1` tokens, the last token of one being the first of the next: every token but the very
first is predicted exactly once, from as much context as its window holds. Conversations are not cut, and none is predicted
from another. Pure arithmetic on arrays; no files, no tokenizer, no ranks.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from titanplans.loss import IGNORED
from titanplans.training.data.chat.chat import Tokens


@dataclass(frozen=True)
class Window:
    """One window, and where the next begins."""

    inputs: np.ndarray
    """`[n]`: n = seq_len but in the last window of a stream of texts, and where conversations leave something over."""

    labels: np.ndarray
    """`[n]`: the token after each input, or -100 where it doesn't count."""

    positions: np.ndarray
    """`[n]`: each input's place in what it may see: its document, or the window."""

    next_document: Any
    """The position of the document with this window's last token, the next one's first; or of the last conversation."""

    next_offset: int
    """That token's place in its document; 1 after a conversation."""

    last_read: Any = None
    """Of best fit: the last document that was read for this window and those packed with it."""

    packed: Sequence[tuple[int, int]] = ()
    """Of best fit: by which other lengths the documents from `next_document` on have been packed; see `pack_best_fit`."""


def pack(
    documents: Iterable[tuple[Any, np.ndarray]], seq_len: int, offset: int = 0, *, apart: bool = False
) -> Iterator[Window]:
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
    live: deque[tuple[Any, np.ndarray]] = deque()
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


def _cut(live: deque[tuple[Any, np.ndarray]], offset: int, n: int, apart: bool) -> Window:
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
    documents: Iterable[tuple[Any, np.ndarray]],
    seq_len: int,
    offset: int = 0,
    packed: Sequence[tuple[int, int]] = (),
    *,
    apart: bool = True,
    drop: bool = False,
) -> Iterator[Window]:
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
    """
    last_read: Any = None

    def read() -> Iterator[tuple[Any, list[np.ndarray]]]:
        nonlocal last_read
        for last_read, tokens in documents:
            yield last_read, [tokens]

    left = read()
    for length, before in packed:
        left = _left(left, length, before, drop)
    part, skipped = divmod(offset, ROWS_AT_ONCE)
    for rows, first, begin, end in _groups(left, seq_len, part, drop):
        for number, row in enumerate(rows[skipped:], skipped + 1):
            document, part = begin if number < len(rows) else end
            each = [np.arange(len(tokens) - 1) for tokens in row]
            yield Window(
                inputs=np.concatenate([tokens[:-1] for tokens in row]),
                labels=np.concatenate([tokens[1:] for tokens in row]),
                positions=np.concatenate(each) if apart else np.arange(sum(map(len, each))),
                next_document=document.position,
                next_offset=part * ROWS_AT_ONCE + number % len(rows),
                last_read=last_read,
                packed=packed if document.position == first else (),
            )
        skipped = 0


class _Document(NamedTuple):
    """A document, cut for rows of one length."""

    position: Any
    pieces: list[np.ndarray]
    """Its tokens: whole, or as the pieces of it that are left."""
    parts: list[np.ndarray]
    """The pieces, none longer than a row."""


class _Part(NamedTuple):
    """A part of a document, by number."""

    document: _Document
    number: int


def _groups(
    documents: Iterator[tuple[Any, list[np.ndarray]]], seq_len: int, part: int, drop: bool
) -> Iterator[tuple[list[list[np.ndarray]], Any, _Part, _Part]]:
    """Yield rows that are filled together, each a list of parts; the first document's position; their first part; the next.

    The first rows begin with `part` of the first document.
    """

    def cut(position: Any, pieces: list[np.ndarray]) -> _Document:
        parts = []
        for piece in pieces:
            if len(piece) - 1 <= seq_len or not drop:
                firsts = range(0, len(piece) - 1, seq_len)
                parts += [piece[first : first + seq_len + 1] for first in firsts]
        return _Document(position, pieces, parts)

    if (first := next(documents, None)) is None:
        return
    begin = end = _Part(cut(*first), part)
    later = (_Part(document, 0) for document in itertools.starmap(cut, documents))
    rows: list[list[np.ndarray]] = []
    room: list[int] = []
    for document, number in itertools.chain([begin], later):
        for at, tokens in enumerate(document.parts[number:], number):
            needed = len(tokens) - 1
            best = min(
                (n for n, r in enumerate(room) if r >= needed), key=room.__getitem__, default=len(rows)
            )
            if best == ROWS_AT_ONCE:
                end = _Part(document, at)
                yield rows, first[0], begin, end
                rows, room, best = [], [], 0
            if not rows:
                begin = _Part(document, at)
            if best == len(rows):
                rows.append([])
                room.append(seq_len)
            rows[best].append(tokens)
            room[best] -= needed
            end = _Part(document, at + 1)
    if rows:
        yield rows, first[0], begin, end


def _left(
    documents: Iterator[tuple[Any, list[np.ndarray]]], seq_len: int, offset: int, drop: bool
) -> Iterator[tuple[Any, list[np.ndarray]]]:
    """What rows of `seq_len` have not used at `offset`: pieces, at the first document's position, then whole documents."""
    part, used = divmod(offset, ROWS_AT_ONCE)
    for rows, first, _, (document, number) in _groups(documents, seq_len, part, drop):
        pieces = [tokens for row in rows[used:] for tokens in row]
        yield first, pieces + (document.parts[number:] if number else [])
        if number == 0:
            yield document.position, document.pieces
        break
    yield from documents


def pack_conversations(
    documents: Iterable[tuple[Any, Tokens]], seq_len: int, offset: int = 0, *, packing: bool = True
) -> Iterator[Window]:
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


def _joined(parts: list[Tokens], last: Any) -> Window:
    return Window(
        inputs=np.concatenate([part.ids[:-1] for part in parts]),
        labels=np.concatenate([np.where(part.counted, part.ids, IGNORED)[1:] for part in parts]),
        positions=np.concatenate([np.arange(len(part) - 1) for part in parts]),
        next_document=last,
        next_offset=1,
    )
