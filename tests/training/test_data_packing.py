"""Windows are the stream, cut without a gap, and can be cut from any point on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanplans.training.data.packing import pack

# Documents as lengths: tokens are numbered through, so that any gap, repeat or swap shows.
lengths = st.lists(st.integers(0, 30), max_size=20)


def documents_of(lengths: list[int]) -> list[tuple[int, np.ndarray]]:
    ends = np.cumsum([0, *lengths])
    return [(i, np.arange(ends[i], ends[i + 1])) for i in range(len(lengths))]


@given(lengths, st.integers(1, 12))
def test_windows_put_together_are_the_documents_put_together(lengths, seq_len):
    windows = list(pack(documents_of(lengths), seq_len))
    stream = np.arange(sum(lengths))
    if len(stream) < 2:
        assert windows == []
        return
    inputs = np.concatenate([w.tokens[:-1] for w in windows])
    labels = np.concatenate([w.tokens[1:] for w in windows])
    assert inputs.tolist() == stream[:-1].tolist()
    assert labels.tolist() == stream[1:].tolist()
    assert all(len(w.positions) == len(w.tokens) - 1 == seq_len for w in windows[:-1])
    assert 1 <= len(windows[-1].positions) <= seq_len


@given(lengths, st.integers(1, 12))
def test_positions_count_from_the_document_or_the_window(lengths, seq_len):
    starts = {int(tokens[0]) for _, tokens in documents_of(lengths) if len(tokens)}
    for window in pack(documents_of(lengths), seq_len):
        expected = []
        for token in window.tokens[:-1]:
            expected.append(0 if not expected or int(token) in starts else expected[-1] + 1)
        assert window.positions.tolist() == expected


@given(lengths, st.integers(1, 12), st.data())
def test_going_on_after_any_window_gives_the_windows_that_followed(lengths, seq_len, data):
    documents = documents_of(lengths)
    windows = list(pack(documents, seq_len))
    if not windows:
        return
    k = data.draw(st.integers(0, len(windows) - 1))
    stopped = windows[k]
    rest = list(pack(documents[stopped.next_document :], seq_len, stopped.next_offset))
    assert [w.tokens.tolist() for w in rest] == [w.tokens.tolist() for w in windows[k + 1 :]]
    assert [w.positions.tolist() for w in rest] == [w.positions.tolist() for w in windows[k + 1 :]]


def test_a_window_is_cut_before_the_document_after_it_is_read():
    def documents():
        yield 0, np.arange(9)
        pytest.fail("asked for a document that the first two windows don't need")

    windows = pack(documents(), seq_len=4)
    assert next(windows).tokens.tolist() == [0, 1, 2, 3, 4]
    assert next(windows).tokens.tolist() == [4, 5, 6, 7, 8]
