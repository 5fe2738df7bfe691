"""Pack documents of tokens into sequences: `pack` cuts them, `pack_best_fit` and `pack_conversations` keep them together.

This is arithmetic on arrays, without files, tokenizer or ranks.
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
    """A sequence, and the position of the next one."""

    inputs: np.ndarray
    """`[n]`: token ids; n is seq_len, or less at the end of the data, or if documents are not cut."""

    labels: np.ndarray
    """`[n]`: the token after each input, or -100 if it does not count."""

    positions: np.ndarray
    """`[n]`: each input's position in its document, or in the sequence if documents are joined."""

    next_document: Any
    """The position of the document from which the next sequence continues; for conversations, the position of the last
    conversation that was used."""

    next_offset: int
    """Where the next sequence begins in that document: the argument `offset` with which the packing function continues."""

    last_read: Any = None
    """For best fit: the position of the last document that was read for the group of this sequence."""

    packed: Sequence[tuple[int, int]] = ()
    """For best fit: how documents from `next_document` on were packed with other sequence lengths; see `pack_best_fit`."""


def pack(
    documents: Iterable[tuple[Any, np.ndarray]], seq_len: int, offset: int = 0, *, apart: bool = False
) -> Iterator[TokenSequence]:
    """Concatenate documents and cut them into sequences.

    A sequence takes `seq_len + 1` tokens, and its last token is also the first of the next sequence, so every token but the
    very first is predicted once. To continue after a sequence, pass the documents from its `next_document` on, and its
    `next_offset`.

    Args:
        documents: pairs of a position and tokens `[n]`; n may be 0.
        seq_len: inputs in a sequence.
        offset: the index of the token in the first document at which the first sequence begins.
        apart: positions restart with each document, and its first token is not predicted. Otherwise positions count from
            the beginning of the sequence.

    Yields:
        Full sequences, and at the end of the documents a shorter sequence if at least one token remains to be predicted.
    """
    buffer: deque[tuple[Any, np.ndarray]] = deque()
    buffered_tokens = -offset
    for position, tokens in documents:
        buffer.append((position, tokens))
        buffered_tokens += len(tokens)
        while buffered_tokens > seq_len:
            sequence = _take_sequence(buffer, offset, seq_len, apart)
            yield sequence
            buffered_tokens -= seq_len
            offset = sequence.next_offset
    if buffered_tokens > 1:
        yield _take_sequence(buffer, offset, buffered_tokens - 1, apart)


def _take_sequence(buffer: deque[tuple[Any, np.ndarray]], offset: int, n: int, apart: bool) -> TokenSequence:
    """Return a sequence of the `n + 1` tokens from `offset` on; remove the documents from `buffer` that are used up."""
    fragments: list[np.ndarray] = []
    missing = n + 1
    while True:
        position, tokens = buffer[0]
        fragment = tokens[offset : offset + missing]
        fragments.append(fragment)
        missing -= len(fragment)
        if missing == 0:
            break
        buffer.popleft()
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
"""The number of sequences that best fit fills together. They are kept in memory; a resumed run tokenises their documents
again."""


def pack_best_fit(
    documents: Iterable[tuple[Any, np.ndarray]],
    seq_len: int,
    offset: int = 0,
    packed: Sequence[tuple[int, int]] = (),
    *,
    apart: bool = True,
    drop: bool = False,
) -> Iterator[TokenSequence]:
    """Pack documents into sequences by best fit: each document goes into the sequence in which it leaves the least room.

    Groups of `SEQUENCES_AT_ONCE` sequences are filled together. To continue after a sequence, pass the documents from its
    `next_document` on, its `next_offset` and its `packed`. With another `seq_len`, pass offset 0 and append the pair (old
    length, `next_offset`) to `packed`.

    Args:
        documents: pairs of a position and tokens; documents of less than two tokens are dropped.
        seq_len: inputs in a sequence.
        offset: an integer with two parts: the number of sequences of the group that have been used, plus
            `SEQUENCES_AT_ONCE` times the number of fragments of the first document that belong to earlier groups.
        packed: pairs of sequence length and offset with which the first documents were packed before, oldest first.
        apart: see `pack`.
        drop: drop documents longer than a sequence; else cut them into fragments.
    """
    last_read: Any = None

    def read() -> Iterator[tuple[Any, list[np.ndarray]]]:
        nonlocal last_read
        for last_read, tokens in documents:
            yield last_read, [tokens]

    remaining = read()
    for earlier_seq_len, earlier_offset in packed:
        remaining = _unused_documents(remaining, earlier_seq_len, earlier_offset, drop)
    fragment, used = divmod(offset, SEQUENCES_AT_ONCE)
    for sequences, first, begin, end in _groups(remaining, seq_len, fragment, drop):
        for count, sequence in enumerate(sequences[used:], used + 1):
            # Within a group the position is the beginning of the group; after the group's last sequence it is the
            # beginning of the next group.
            document, fragment = begin if count < len(sequences) else end
            positions = [np.arange(len(tokens) - 1) for tokens in sequence]
            yield TokenSequence(
                inputs=np.concatenate([tokens[:-1] for tokens in sequence]),
                labels=np.concatenate([tokens[1:] for tokens in sequence]),
                positions=np.concatenate(positions) if apart else np.arange(sum(map(len, positions))),
                next_document=document.position,
                next_offset=fragment * SEQUENCES_AT_ONCE + count % len(sequences),
                last_read=last_read,
                packed=packed if document.position == first else (),
            )
        used = 0


class _Document(NamedTuple):
    """A document, cut into fragments for sequences of one length."""

    position: Any
    tokens: list[np.ndarray]
    """The tokens: one array, or the fragments that are left after sequences of another length have used some."""
    fragments: list[np.ndarray]
    """The same tokens, cut so that each fragment fits into a sequence."""


class _Fragment(NamedTuple):
    """A fragment of a document, by index."""

    document: _Document
    index: int


def _groups(
    documents: Iterator[tuple[Any, list[np.ndarray]]], seq_len: int, fragment: int, drop: bool
) -> Iterator[tuple[list[list[np.ndarray]], Any, _Fragment, _Fragment]]:
    """Yield groups of sequences that are filled together.

    A group is a tuple: its sequences (lists of fragments), the position of the first of `documents`, the first
    fragment of the group, and the first fragment of the next group. The first group begins with `fragment` of the first
    document.
    """

    def cut(position: Any, arrays: list[np.ndarray]) -> _Document:
        fragments = []
        for tokens in arrays:
            if len(tokens) - 1 <= seq_len or not drop:
                # The last token of a fragment is the first of the next one: a label in the former, an input in the latter.
                starts = range(0, len(tokens) - 1, seq_len)
                fragments += [tokens[start : start + seq_len + 1] for start in starts]
        return _Document(position, arrays, fragments)

    if (first := next(documents, None)) is None:
        return
    begin = end = _Fragment(cut(*first), fragment)
    later = (_Fragment(document, 0) for document in itertools.starmap(cut, documents))
    sequences: list[list[np.ndarray]] = []
    room: list[int] = []
    for document, start in itertools.chain([begin], later):
        for index, tokens in enumerate(document.fragments[start:], start):
            needed = len(tokens) - 1
            best = min(
                (n for n, r in enumerate(room) if r >= needed), key=room.__getitem__, default=len(sequences)
            )
            if best == SEQUENCES_AT_ONCE:
                end = _Fragment(document, index)
                yield sequences, first[0], begin, end
                sequences, room, best = [], [], 0
            if not sequences:
                begin = _Fragment(document, index)
            if best == len(sequences):
                sequences.append([])
                room.append(seq_len)
            sequences[best].append(tokens)
            room[best] -= needed
            end = _Fragment(document, index + 1)
    if sequences:
        yield sequences, first[0], begin, end


def _unused_documents(
    documents: Iterator[tuple[Any, list[np.ndarray]]], seq_len: int, offset: int, drop: bool
) -> Iterator[tuple[Any, list[np.ndarray]]]:
    """Yield the documents that sequences of `seq_len` have not used up to `offset`.

    The unused fragments of a partly used group come first, as if they were one document at the first position.
    """
    fragment, used = divmod(offset, SEQUENCES_AT_ONCE)
    for sequences, first, _, (document, index) in _groups(documents, seq_len, fragment, drop):
        unused = [tokens for sequence in sequences[used:] for tokens in sequence]
        yield first, unused + (document.fragments[index:] if index else [])
        if index == 0:
            yield document.position, document.tokens
        break
    yield from documents


def pack_conversations(
    documents: Iterable[tuple[Any, Tokens]], seq_len: int, offset: int = 0, *, packing: bool = True
) -> Iterator[TokenSequence]:
    """Pack conversations into sequences, in their order and without cutting any.

    No token of a conversation is predicted from another conversation. To continue after a sequence, pass the documents from
    its `next_document` on, and its `next_offset`.

    Args:
        documents: pairs of a position and a conversation of at most `seq_len + 1` tokens, of which at least one counts.
        seq_len: inputs in a sequence.
        offset: 1 to skip the first conversation, else 0.
        packing: put as many conversations into a sequence as fit; otherwise only one.
    """
    packed: list[Tokens] = []
    inputs, last = 0, None
    for position, tokens in itertools.islice(documents, offset, None):
        if packed and (not packing or inputs + len(tokens) - 1 > seq_len):
            yield _join(packed, last)
            packed, inputs = [], 0
        packed.append(tokens)
        inputs, last = inputs + len(tokens) - 1, position
    if packed:
        yield _join(packed, last)


def _join(conversations: list[Tokens], last: Any) -> TokenSequence:
    return TokenSequence(
        inputs=np.concatenate([tokens.ids[:-1] for tokens in conversations]),
        labels=np.concatenate(
            [np.where(tokens.counted, tokens.ids, IGNORED)[1:] for tokens in conversations]
        ),
        positions=np.concatenate([np.arange(len(tokens) - 1) for tokens in conversations]),
        next_document=last,
        next_offset=1,
    )
