"""Documents to windows: one stream of tokens, cut without a gap.

The documents' tokens are put end to end and read in windows of `seq_len + 1`, the last token of one
being the first of the next: every token but the very first is predicted exactly once, from as much
context as its window holds. Pure arithmetic on arrays; no files, no tokenizer, no ranks.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

P = TypeVar("P")
"""The position of a document, of whatever kind the source uses."""


@dataclass(frozen=True)
class Window(Generic[P]):
    """One window, and where the next begins."""

    tokens: np.ndarray
    """`[n + 1]`: n inputs and, one place on, their n labels; n = seq_len but in the stream's last window."""

    positions: np.ndarray
    """`[n]`: each input's place in its document, counted from the window's start in a document that began earlier."""

    next_document: P
    """The document that holds the next window's first token, the last of this one."""

    next_offset: int
    """That token's place in its document."""


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
    return Window(
        tokens=np.concatenate(parts),
        positions=np.concatenate([np.arange(len(part)) for part in parts])[:n],
        next_document=position,
        next_offset=offset + len(part) - 1,
    )
