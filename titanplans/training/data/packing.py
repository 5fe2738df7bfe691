"""Documents of tokens packed into sequences: cut to `seq_len`, whole ones by best fit, or conversations.

Cut sequences have `seq_len + 1` tokens, the last token of one being the first of the next: every token but the very
first is predicted exactly once, from as much context as its sequence holds. Conversations are not cut, and none is predicted
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
class TokenSequence:
    """One sequence, and where the next begins."""

    inputs: np.ndarray
    """`[n]`: n = seq_len but in the last sequence of a reader of texts, and where conversations leave something over."""

    labels: np.ndarray
    """`[n]`: the token after each input, or -100 where it doesn't count."""

    positions: np.ndarray
    """`[n]`: each input's position in what it may see: its document, or the sequence."""

    next_document: Any
    """The position of the document with this sequence's last token, the next one's first; or of the last conversation."""

    next_offset: int
    """That token's index in its document; 1 after a conversation."""

    last_read: Any = None
    """Under best fit: the last document that was read for this sequence and those packed with it."""

    packed: Sequence[tuple[int, int]] = ()
    """Under best fit: by which other lengths the documents from `next_document` on have been packed; see `pack_best_fit`."""


def pack(
    documents: Iterable[tuple[Any, np.ndarray]], seq_len: int, offset: int = 0, *, apart: bool = False
) -> Iterator[TokenSequence]:
    """Cut `documents`, pairs of position and tokens, into sequences, one document after another.

    To go on after a sequence, pass the documents from `next_document` on, and `next_offset`.

    Args:
        documents: positions and tokens `[any length, also 0]`.
        seq_len: inputs in a sequence.
        offset: where in the first document the first sequence begins.
        apart: no document's first token is predicted, from another's last; else positions count through the sequence.

    Yields:
        Full sequences; at the end of the documents one shorter sequence, if anything is left to predict.
    """
    held: deque[tuple[Any, np.ndarray]] = deque()
    tokens_held = -offset
    for position, tokens in documents:
        held.append((position, tokens))
        tokens_held += len(tokens)
        while tokens_held > seq_len:
            sequence = _cut(held, offset, seq_len, apart)
            yield sequence
            tokens_held -= seq_len
            offset = sequence.next_offset
    if tokens_held > 1:
        yield _cut(held, offset, tokens_held - 1, apart)


def _cut(held: deque[tuple[Any, np.ndarray]], offset: int, n: int, apart: bool) -> TokenSequence:
    """Return the `n + 1` tokens from `offset` on; remove the documents from `held` that end before the last of these."""
    fragments: list[np.ndarray] = []
    wanted = n + 1
    while True:
        position, tokens = held[0]
        fragment = tokens[offset : offset + wanted]
        fragments.append(fragment)
        wanted -= len(fragment)
        if wanted == 0:
            break
        held.popleft()
        offset = 0
    tokens, positions = np.concatenate(fragments), np.arange(n + 1)
    if apart:
        positions = np.concatenate([np.arange(len(fragment)) for fragment in fragments])
    return TokenSequence(
        inputs=tokens[:-1],
        labels=np.where(positions[1:] == 0, IGNORED, tokens[1:]),
        positions=positions[:n],
        next_document=position,
        next_offset=offset + len(fragment) - 1,
    )


SEQUENCES_AT_ONCE = 32
"""Sequences that best fit fills at a time: it holds them, and their documents' tokens again after a resume."""


def pack_best_fit(
    documents: Iterable[tuple[Any, np.ndarray]],
    seq_len: int,
    offset: int = 0,
    packed: Sequence[tuple[int, int]] = (),
    *,
    apart: bool = True,
    drop: bool = False,
) -> Iterator[TokenSequence]:
    """Put whole documents into sequences, each where it leaves the least room.

    To go on after a sequence, pass the documents from `next_document` on, its `next_offset` and its `packed`; with another
    `seq_len`, pass offset 0 and add the pair of the old length and `next_offset` to `packed`.

    Args:
        documents: positions and tokens; those of less than two are left out.
        seq_len: inputs in a sequence.
        offset: sequences to leave out, and `SEQUENCES_AT_ONCE` times the fragments of the first document.
        packed: lengths of sequences, and offsets, by which the first documents were packed before, one after another.
        apart: as for `pack`.
        drop: documents longer than a sequence are left out; else they are cut into sequences.
    """
    last_read: Any = None

    def read() -> Iterator[tuple[Any, list[np.ndarray]]]:
        nonlocal last_read
        for last_read, tokens in documents:
            yield last_read, [tokens]

    left = read()
    for length, before in packed:
        left = _left(left, length, before, drop)
    fragment, skipped = divmod(offset, SEQUENCES_AT_ONCE)
    for sequences, first, begin, end in _groups(left, seq_len, fragment, drop):
        for index, sequence in enumerate(sequences[skipped:], skipped + 1):
            document, fragment = begin if index < len(sequences) else end
            each = [np.arange(len(tokens) - 1) for tokens in sequence]
            yield TokenSequence(
                inputs=np.concatenate([tokens[:-1] for tokens in sequence]),
                labels=np.concatenate([tokens[1:] for tokens in sequence]),
                positions=np.concatenate(each) if apart else np.arange(sum(map(len, each))),
                next_document=document.position,
                next_offset=fragment * SEQUENCES_AT_ONCE + index % len(sequences),
                last_read=last_read,
                packed=packed if document.position == first else (),
            )
        skipped = 0


class _Document(NamedTuple):
    """A document, cut for sequences of one length."""

    position: Any
    left: list[np.ndarray]
    """Its tokens: whole, or what other sequences have left of it."""
    fragments: list[np.ndarray]
    """The same, none longer than a sequence."""


class _Fragment(NamedTuple):
    """A fragment of a document, by index."""

    document: _Document
    at: int


def _groups(
    documents: Iterator[tuple[Any, list[np.ndarray]]], seq_len: int, fragment: int, drop: bool
) -> Iterator[tuple[list[list[np.ndarray]], Any, _Fragment, _Fragment]]:
    """Yield sequences that are filled together, the first document's position, their first fragment, and the next one.

    Each sequence is a list of fragments. The first sequences begin with `fragment` of the first document.
    """

    def cut(position: Any, left: list[np.ndarray]) -> _Document:
        fragments = []
        for tokens in left:
            if len(tokens) - 1 <= seq_len or not drop:
                firsts = range(0, len(tokens) - 1, seq_len)
                fragments += [tokens[first : first + seq_len + 1] for first in firsts]
        return _Document(position, left, fragments)

    if (first := next(documents, None)) is None:
        return
    begin = end = _Fragment(cut(*first), fragment)
    later = (_Fragment(document, 0) for document in itertools.starmap(cut, documents))
    sequences: list[list[np.ndarray]] = []
    room: list[int] = []
    for document, index in itertools.chain([begin], later):
        for at, tokens in enumerate(document.fragments[index:], index):
            needed = len(tokens) - 1
            best = min(
                (n for n, r in enumerate(room) if r >= needed), key=room.__getitem__, default=len(sequences)
            )
            if best == SEQUENCES_AT_ONCE:
                end = _Fragment(document, at)
                yield sequences, first[0], begin, end
                sequences, room, best = [], [], 0
            if not sequences:
                begin = _Fragment(document, at)
            if best == len(sequences):
                sequences.append([])
                room.append(seq_len)
            sequences[best].append(tokens)
            room[best] -= needed
            end = _Fragment(document, at + 1)
    if sequences:
        yield sequences, first[0], begin, end


def _left(
    documents: Iterator[tuple[Any, list[np.ndarray]]], seq_len: int, offset: int, drop: bool
) -> Iterator[tuple[Any, list[np.ndarray]]]:
    """Yield what sequences of `seq_len` have not used at `offset`: fragments, as the first document, then whole ones."""
    fragment, used = divmod(offset, SEQUENCES_AT_ONCE)
    for sequences, first, _, (document, index) in _groups(documents, seq_len, fragment, drop):
        left = [tokens for sequence in sequences[used:] for tokens in sequence]
        yield first, left + (document.fragments[index:] if index else [])
        if index == 0:
            yield document.position, document.left
        break
    yield from documents


def pack_conversations(
    documents: Iterable[tuple[Any, Tokens]], seq_len: int, offset: int = 0, *, packing: bool = True
) -> Iterator[TokenSequence]:
    """Put conversations into sequences, each whole, in their order.

    To go on after a sequence, pass the documents from `next_document` on, and `next_offset`.

    Args:
        documents: positions and conversations of at most `seq_len + 1` tokens.
        seq_len: inputs in a sequence.
        offset: 1 to leave out the first conversation, else 0.
        packing: as many as fit; else one in a sequence.

    Yields:
        Sequences with at least one token that counts each.
    """
    packed: list[Tokens] = []
    tokens_held, last = 0, None
    for position, tokens in itertools.islice(documents, offset, None):
        if packed and (not packing or tokens_held + len(tokens) - 1 > seq_len):
            yield _joined(packed, last)
            packed, tokens_held = [], 0
        packed.append(tokens)
        tokens_held, last = tokens_held + len(tokens) - 1, position
    if packed:
        yield _joined(packed, last)


def _joined(conversations: list[Tokens], last: Any) -> TokenSequence:
    return TokenSequence(
        inputs=np.concatenate([each.ids[:-1] for each in conversations]),
        labels=np.concatenate([np.where(each.counted, each.ids, IGNORED)[1:] for each in conversations]),
        positions=np.concatenate([np.arange(len(each) - 1) for each in conversations]),
        next_document=last,
        next_offset=1,
    )
