"""Sequences are consecutive fragments of the documents without a gap, and packing can resume at any point."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanplans.loss import IGNORED
from titanplans.training.data.chat.chat import Tokens
from titanplans.training.data.packing import pack, pack_best_fit, pack_conversations

# Lengths of documents. Their tokens are numbered consecutively, so that any gap, repeat or swap shows.
lengths = st.lists(st.integers(0, 30), max_size=20)
some_lengths = st.lists(st.integers(0, 40), max_size=90)
# enough documents for several groups of sequences that are packed together
many_lengths = st.lists(st.integers(0, 40), min_size=30, max_size=90)


def documents_of(lengths: list[int]) -> list[tuple[int, np.ndarray]]:
    ends = np.cumsum([0, *lengths])
    return [(i, np.arange(ends[i], ends[i + 1])) for i in range(len(lengths))]


@given(lengths, st.integers(1, 12))
def test_concatenated_sequences_are_the_concatenated_documents(lengths, seq_len):
    sequences = list(pack(documents_of(lengths), seq_len))
    reader = np.arange(sum(lengths))
    if len(reader) < 2:
        assert sequences == []
        return
    inputs = np.concatenate([w.inputs for w in sequences])
    labels = np.concatenate([w.labels for w in sequences])
    assert inputs.tolist() == reader[:-1].tolist()
    assert labels.tolist() == reader[1:].tolist()
    assert all(len(w.positions) == len(w.inputs) == len(w.labels) == seq_len for w in sequences[:-1])
    assert 1 <= len(sequences[-1].positions) <= seq_len


@given(lengths, st.integers(1, 12))
def test_positions_count_from_the_start_of_the_document_or_of_the_sequence(lengths, seq_len):
    starts = {int(tokens[0]) for _, tokens in documents_of(lengths) if len(tokens)}
    joined = pack(documents_of(lengths), seq_len)
    for sequence, joined_sequence in zip(
        pack(documents_of(lengths), seq_len, apart=True), joined, strict=True
    ):
        expected = []
        for token in sequence.inputs:
            expected.append(0 if not expected or int(token) in starts else expected[-1] + 1)
        assert sequence.positions.tolist() == expected
        assert joined_sequence.positions.tolist() == list(range(len(expected)))
        # The token after the last token of a document is the first of another document, and is not predicted.
        labels = [IGNORED if int(label) in starts else int(label) for label in joined_sequence.labels]
        assert sequence.labels.tolist() == labels


def test_a_sequence_is_returned_before_the_next_document_is_read():
    def documents():
        yield 0, np.arange(9)
        pytest.fail("asked for a document that the first two sequences don't need")

    sequences = pack(documents(), seq_len=4)
    assert next(sequences).labels.tolist() == [1, 2, 3, 4]
    assert next(sequences).labels.tolist() == [5, 6, 7, 8]


def conversations_of(lengths: list[int]) -> list[tuple[int, Tokens]]:
    return [(i, Tokens(ids, ids % 3 > 0)) for i, ids in documents_of(lengths)]


short = st.lists(st.integers(3, 9), max_size=20)


@given(short, st.integers(8, 20), st.booleans())
def test_conversations_are_not_split_stay_in_order_and_none_predicts_another(lengths, seq_len, packing):
    conversations = conversations_of(lengths)
    sequences = list(pack_conversations(conversations, seq_len, packing=packing))
    assert all(len(w.inputs) == len(w.labels) == len(w.positions) <= seq_len for w in sequences)
    starts = [np.flatnonzero(w.positions == 0) for w in sequences]
    fragments = [
        (fragment.tolist(), labels.tolist())
        for w, cuts in zip(sequences, starts, strict=True)
        for fragment, labels in zip(np.split(w.inputs, cuts)[1:], np.split(w.labels, cuts)[1:], strict=True)
    ]
    assert fragments == [
        (t.ids[:-1].tolist(), [i if i % 3 else -100 for i in t.ids[1:].tolist()]) for _, t in conversations
    ]
    assert packing or all(len(cuts) == 1 for cuts in starts)
    for sequence, following in itertools.pairwise(sequences):
        first = next(
            np.diff(np.append(np.flatnonzero(following.positions == 0), len(following.positions))).flat
        )
        assert not packing or len(sequence.inputs) + first > seq_len, "it would have fitted into the sequence"


def pairs_of(sequences) -> list[tuple[int, int]]:
    """Return pairs of token and label of the sequences, in the order of the tokens."""
    return sorted((int(x), int(y)) for w in sequences for x, y in zip(w.inputs, w.labels, strict=True))


def within(documents) -> list[tuple[int, int]]:
    return [(x, x + 1) for _, tokens in documents for x in tokens[:-1]]


@given(some_lengths, st.integers(1, 12))
def test_best_fit_predicts_every_token_of_a_document_once(lengths, seq_len):
    sequences = list(pack_best_fit(documents_of(lengths), seq_len))
    assert pairs_of(sequences) == within(documents_of(lengths))
    assert all(1 <= len(w.inputs) <= seq_len for w in sequences)


PACKERS = {
    "cut": (lengths, st.integers(1, 12), documents_of, pack),
    "best fit": (some_lengths, st.integers(1, 12), documents_of, pack_best_fit),
    "conversations": (short, st.integers(8, 20), conversations_of, pack_conversations),
}


def plain(sequences):
    return [(w.inputs.tolist(), w.labels.tolist(), w.positions.tolist()) for w in sequences]


@pytest.mark.parametrize("name", PACKERS)
@given(draw=st.data())
def test_packing_resumes_after_any_sequence(name, draw):
    lengths, seq_lens, documents_of, packed = PACKERS[name]
    documents, seq_len = documents_of(draw.draw(lengths)), draw.draw(seq_lens)
    if sequences := list(packed(documents, seq_len)):
        k = draw.draw(st.integers(0, len(sequences) - 1))
        resumed = packed(documents[sequences[k].next_document :], seq_len, sequences[k].next_offset)
        assert plain(resumed) == plain(sequences[k + 1 :])


@given(many_lengths, st.lists(st.integers(1, 40), min_size=2, max_size=4), st.data())
def test_after_a_change_of_length_best_fit_reads_every_token_once(lengths, changes, draw):
    """The length changes at random sequences, also among documents that were packed for earlier lengths."""
    documents = documents_of(lengths)
    document, offset, packed, taken = 0, 0, (), []
    for seq_len in changes:
        sequences = list(pack_best_fit(documents[document:], seq_len, offset, packed))
        assert all(1 <= len(w.inputs) <= seq_len for w in sequences)
        if not sequences:
            continue
        k = draw.draw(st.integers(0, len(sequences) - 1))
        taken += sequences[: k + 1]
        stopped = sequences[k]
        document, offset, packed = stopped.next_document, stopped.next_offset, stopped.packed
        assert plain(pack_best_fit(documents[document:], seq_len, offset, packed)) == plain(
            sequences[k + 1 :]
        )
        offset, packed = 0, (*packed, (seq_len, offset))
    taken += pack_best_fit(documents[document:], 7, offset, packed)
    assert pairs_of(taken) == within(documents)
