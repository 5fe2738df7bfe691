"""Documents to windows: of texts one stream of tokens, cut without a gap; of conversations as many whole ones as fit.

The texts' tokens are put end to end and read in windows of `seq_len + 1`, the last token of one
being the first of the next: every token but the very first is predicted exactly once, from as much
context as its window holds. Conversations are not cut, and none is predicted from another. Pure arithmetic on arrays; no
files, no tokenizer, no ranks.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

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
    """`[n]`: each input's place in its document, counted from the window's start in a document that began earlier."""

    next_document: P
    """The document that holds the next window's first token, the last of this one; the last conversation of this one."""

    next_offset: int
    """That token's place in its document; 1 after a conversation."""


def pack(documents: Iterable[tuple[P, np.ndarray]], seq_len: int, offset: int = 0) -> Iterator[Window[P]]:
    """Cuts the stream of `documents`, pairs of position and tokens, into windows.

    To go on after a window, pass the documents from `next_document` on, and `next_offset`.

    Args:
        documents: positions and tokens `[any length, also 0]`.
        seq_len: inputs in a window.
        offset: where in the first document the first window begins.

    Yields:
        Full windows; at the end of the documents one shorter window, if anything is left to predict.
    """
    live: deque[tuple[P, np.ndarray]] = deque()
    held = -offset
    for position, tokens in documents:
        live.append((position, tokens))
        held += len(tokens)
        while held > seq_len:
            window = _cut(live, offset, seq_len)
            yield window
            held -= seq_len
            offset = window.next_offset
    if held > 1:
        yield _cut(live, offset, held - 1)


def _cut(live: deque[tuple[P, np.ndarray]], offset: int, n: int) -> Window[P]:
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
    tokens = np.concatenate(parts)
    return Window(
        inputs=tokens[:-1],
        labels=tokens[1:],
        positions=np.concatenate([np.arange(len(part)) for part in parts])[:n],
        next_document=position,
        next_offset=offset + len(part) - 1,
    )


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
