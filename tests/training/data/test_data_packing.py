"""Windows are the stream, cut without a gap, and can be cut from any point on."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanplans.loss import IGNORED
from titanplans.training.data.chat.chat import Tokens
from titanplans.training.data.packing import pack, pack_conversations

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
    inputs = np.concatenate([w.inputs for w in windows])
    labels = np.concatenate([w.labels for w in windows])
    assert inputs.tolist() == stream[:-1].tolist()
    assert labels.tolist() == stream[1:].tolist()
    assert all(len(w.positions) == len(w.inputs) == len(w.labels) == seq_len for w in windows[:-1])
    assert 1 <= len(windows[-1].positions) <= seq_len


@given(lengths, st.integers(1, 12))
def test_positions_count_from_the_document_or_the_window(lengths, seq_len):
    starts = {int(tokens[0]) for _, tokens in documents_of(lengths) if len(tokens)}
    joined = pack(documents_of(lengths), seq_len)
    for window, whole in zip(pack(documents_of(lengths), seq_len, apart=True), joined, strict=True):
        expected = []
        for token in window.inputs:
            expected.append(0 if not expected or int(token) in starts else expected[-1] + 1)
        assert window.positions.tolist() == expected
        assert whole.positions.tolist() == list(range(len(expected)))
        # What follows on a document's last token is another's first, which is not predicted.
        labels = [IGNORED if int(label) in starts else int(label) for label in whole.labels]
        assert window.labels.tolist() == labels


@given(lengths, st.integers(1, 12), st.data())
def test_going_on_after_any_window_gives_the_windows_that_followed(lengths, seq_len, data):
    documents = documents_of(lengths)
    windows = list(pack(documents, seq_len))
    if not windows:
        return
    k = data.draw(st.integers(0, len(windows) - 1))
    stopped = windows[k]
    rest = list(pack(documents[stopped.next_document :], seq_len, stopped.next_offset))
    assert [w.inputs.tolist() for w in rest] == [w.inputs.tolist() for w in windows[k + 1 :]]
    assert [w.labels.tolist() for w in rest] == [w.labels.tolist() for w in windows[k + 1 :]]
    assert [w.positions.tolist() for w in rest] == [w.positions.tolist() for w in windows[k + 1 :]]


def test_a_window_is_cut_before_the_document_after_it_is_read():
    def documents():
        yield 0, np.arange(9)
        pytest.fail("asked for a document that the first two windows don't need")

    windows = pack(documents(), seq_len=4)
    assert next(windows).labels.tolist() == [1, 2, 3, 4]
    assert next(windows).labels.tolist() == [5, 6, 7, 8]


def conversations_of(lengths: list[int]) -> list[tuple[int, Tokens]]:
    return [(i, Tokens(ids, ids % 3 > 0)) for i, ids in documents_of(lengths)]


short = st.lists(st.integers(3, 9), max_size=20)


@given(short, st.integers(8, 20), st.booleans())
def test_conversations_stay_whole_and_in_order_and_none_predicts_another(lengths, seq_len, packing):
    conversations = conversations_of(lengths)
    windows = list(pack_conversations(conversations, seq_len, packing=packing))
    assert all(len(w.inputs) == len(w.labels) == len(w.positions) <= seq_len for w in windows)
    starts = [np.flatnonzero(w.positions == 0) for w in windows]
    parts = [
        (part.tolist(), labels.tolist())
        for w, cuts in zip(windows, starts, strict=True)
        for part, labels in zip(np.split(w.inputs, cuts)[1:], np.split(w.labels, cuts)[1:], strict=True)
    ]
    assert parts == [
        (t.ids[:-1].tolist(), [i if i % 3 else -100 for i in t.ids[1:].tolist()]) for _, t in conversations
    ]
    assert packing or all(len(cuts) == 1 for cuts in starts)
    for one, other in itertools.pairwise(windows):
        first = next(np.diff(np.append(np.flatnonzero(other.positions == 0), len(other.positions))).flat)
        assert not packing or len(one.inputs) + first > seq_len, "it would have fitted"


@given(short, st.integers(8, 20), st.data())
def test_going_on_after_any_window_of_conversations_gives_those_that_followed(lengths, seq_len, data):
    conversations = conversations_of(lengths)
    windows = list(pack_conversations(conversations, seq_len))
    if not windows:
        return
    k = data.draw(st.integers(0, len(windows) - 1))
    rest = pack_conversations(conversations[windows[k].next_document :], seq_len, windows[k].next_offset)
    assert [w.inputs.tolist() for w in rest] == [w.inputs.tolist() for w in windows[k + 1 :]]
