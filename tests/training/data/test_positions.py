"""Every token is read once and every global batch is the same for any number of ranks, even if the number changes."""

import json
from collections import Counter
from typing import ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from titanplans.config.sections.data import Data
from titanplans.training.data.batches import StepBatches
from titanplans.training.data.corpus.sources import Shuffled
from titanplans.training.data.packed_source import PackedSource
from titanplans.training.data.positions import BatchSlice, DataPosition, divide, merged
from titanplans.training.data.positions import source_of as source_of_row


class Corpus:
    """Documents of given lengths. Tokens are numbered consecutively, so that any gap, repeat or swap shows."""

    files = ()
    identity: ClassVar[dict[str, int]] = {"piece_bytes": 0}

    def __init__(self, lengths):
        self.ends = np.cumsum([0, *lengths])

    def __len__(self):
        return len(self.ends) - 1

    def document(self, i):
        return f"{self.ends[i]} {self.ends[i + 1]}"


class Tokenizer:
    def encode(self, text, **_):
        return list(range(*map(int, text.split())))


def source_of(lengths):
    return Shuffled(Corpus(lengths), {"dataset": "numbers"}, seed=3)


def run(source, position, slice_size, ranks, workers, seq_len, steps):
    """Return the sequences of `steps` steps in order, and the position after them, as a checkpoint saves it."""
    by_step, positions = [[] for _ in range(steps)], []
    for rank in range(ranks):
        batch_slice = BatchSlice(slice_size, rank, ranks, workers)
        sources = [PackedSource("numbers", source, Data(documents="joined"), Tokenizer(), seq_len)]
        sequences = StepBatches(sources, seq_len, batch_slice, position, weights=[1.0])
        of_workers = [sequences._batches(position, worker) for worker in range(workers)]
        by_reader = dict(position.by_reader)
        for step in range(steps):
            batch = next(of_workers[step % workers])
            assert batch.tokens.shape == (slice_size, seq_len)
            by_step[step] += batch.tokens.tolist()
            by_reader |= batch.by_reader
        positions.append(
            DataPosition(position.readers, position.sequences + steps * batch_slice.global_batch, by_reader)
        )
    return by_step, DataPosition.from_json(json.loads(json.dumps(merged(positions).to_json())))


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=30)
phases = st.lists(
    st.tuples(
        st.integers(1, 3),  # sequences per rank
        st.integers(1, 4),  # ranks
        st.integers(1, 3),  # workers
        st.integers(2, 9),  # tokens in a sequence
        st.integers(0, 4),  # steps
    ),
    min_size=1,
    max_size=4,
)


@given(lengths, phases)
def test_no_token_is_read_twice_or_skipped_whatever_changes_at_any_step(lengths, phases):
    source = source_of(lengths)
    size, ranks, workers, *_ = phases[0]
    position = DataPosition(divide(source.choose_readers, BatchSlice(size, 0, ranks, workers)))
    read = {reader: [] for reader in range(position.readers.count)}
    for size, ranks, workers, seq_len, steps in phases:
        first = position.sequences
        by_step, position = run(source, position, size, ranks, workers, seq_len, steps)
        for sequence, tokens_of_sequence in enumerate(
            (tokens_of_sequence for step in by_step for tokens_of_sequence in step), first
        ):
            read[position.readers.locate(sequence)[0]] += tokens_of_sequence
    for reader, tokens in read.items():
        expected, epoch = [], 0
        while len(expected) < len(tokens):
            for _, text in source.documents(epoch, reader, position.readers.count, None):
                expected += Tokenizer().encode(text)
            epoch += 1
        assert tokens == expected[: len(tokens)]


@given(
    lengths,
    st.sampled_from([1, 2, 4, 6, 12]),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 3)), max_size=3),
)
def test_a_global_batch_is_the_same_on_any_number_of_ranks_and_workers(lengths, began_with, others):
    source = source_of(lengths)
    start = DataPosition(divide(source.choose_readers, BatchSlice(12 // began_with, 0, began_with)))
    undisturbed, _ = run(source, start, 12 // began_with, began_with, 1, 5, 1 + 2 * len(others))
    position, resumed = start, []
    for ranks, workers in others:
        by_step, position = run(source, position, 12 // ranks, ranks, workers, 5, 2)
        resumed += by_step
    assert resumed == undisturbed[: len(resumed)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 60), st.data())
def test_ranks_and_workers_have_different_readers_which_alternate(size, ranks, workers, documents, data):
    readers = divide(source_of([1] * documents).choose_readers, BatchSlice(size, 0, ranks, workers))
    slots = size * ranks * workers
    assert readers.count * readers.sequences_per_turn == slots
    opened = {}
    for rank in range(ranks):
        for worker in range(workers):
            batch_slice = BatchSlice(size, rank, ranks, workers)
            indices = [n for step in range(worker, 4 * workers, workers) for n in batch_slice.of(slots, step)]
            opened[rank, worker] = {readers.locate(n)[0] for n in indices}
    if documents >= ranks * workers:
        assert sum(map(len, opened.values())) == readers.count == len(set.union(*opened.values()))
        assert documents < slots or readers.count == slots
    else:
        assert readers.count == 1
    n = data.draw(st.integers(0, 1000))
    sequences = [readers.locate(i)[1] for i in range(n) if readers.locate(i)[0] == 0]
    assert sequences == list(range(len(sequences)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.integers(1, 200))
def test_the_first_sequences_are_of_the_sources_by_weight(weights, sequences):
    counts = Counter(source_of_row(index, weights) for index in range(sequences))
    for source, weight in enumerate(weights):
        assert abs(counts[source] - sequences * weight / sum(weights)) < len(weights)
        assert weight or not counts[source]
