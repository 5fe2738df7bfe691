"""Every token is read once, and every global batch is the same, whatever the number of ranks, and whenever it changes."""

import json
from collections import Counter
from typing import ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from titanplans.config.sections.data import Data
from titanplans.training.data.corpus.sources import Shuffled
from titanplans.training.data.dataset import PackedText
from titanplans.training.data.mixture import PackedSource
from titanplans.training.data.streams import BatchSlice, DataPosition, divide, merged
from titanplans.training.data.streams import source_of as source_of_row


class Corpus:
    """Documents as lengths: tokens are numbered through, so that any gap, repeat or swap shows."""

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


def run(source, place, share_size, ranks, workers, seq_len, steps):
    """The sequences of some steps in their order, and the place afterwards, as a checkpoint would hold it."""
    rows, places = [[] for _ in range(steps)], []
    for rank in range(ranks):
        share = BatchSlice(share_size, rank, ranks, workers)
        parts = [PackedSource("numbers", source, Data(documents="joined"), Tokenizer(), seq_len)]
        windows = PackedText(parts, seq_len, share, place, weights=[1.0])
        of_workers = [windows._batches(place, worker) for worker in range(workers)]
        cursors = dict(place.cursors)
        for step in range(steps):
            batch = next(of_workers[step % workers])
            assert batch.tokens.shape == (share_size, seq_len)
            rows[step] += batch.tokens.tolist()
            cursors |= batch.cursors
        places.append(DataPosition(place.streams, place.sequences + steps * share.global_batch, cursors))
    return rows, DataPosition.from_json(json.loads(json.dumps(merged(places).to_json())))


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=30)
phases = st.lists(
    st.tuples(
        st.integers(1, 3),  # sequences a rank
        st.integers(1, 4),  # ranks
        st.integers(1, 3),  # workers
        st.integers(2, 9),  # tokens in a sequence
        st.integers(0, 4),  # steps
    ),
    min_size=1,
    max_size=4,
)


@given(lengths, phases)
def test_no_token_is_read_twice_or_left_out_when_anything_changes_at_any_step(lengths, phases):
    source = source_of(lengths)
    size, ranks, workers, *_ = phases[0]
    place = DataPosition(divide(source.choose_streams, BatchSlice(size, 0, ranks, workers)))
    read = {stream: [] for stream in range(place.streams.count)}
    for size, ranks, workers, seq_len, steps in phases:
        first = place.sequences
        rows, place = run(source, place, size, ranks, workers, seq_len, steps)
        for sequence, row in enumerate((row for step in rows for row in step), first):
            read[place.streams.place(sequence)[0]] += row
    for stream, tokens in read.items():
        whole, epoch = [], 0
        while len(whole) < len(tokens):
            for _, text in source.documents(epoch, stream, place.streams.count, None):
                whole += Tokenizer().encode(text)
            epoch += 1
        assert tokens == whole[: len(tokens)]


@given(
    lengths,
    st.sampled_from([1, 2, 4, 6, 12]),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 3)), max_size=3),
)
def test_a_global_batch_is_the_same_on_any_number_of_ranks_and_workers(lengths, began_with, others):
    source = source_of(lengths)
    start = DataPosition(divide(source.choose_streams, BatchSlice(12 // began_with, 0, began_with)))
    undisturbed, _ = run(source, start, 12 // began_with, began_with, 1, 5, 1 + 2 * len(others))
    place, resumed = start, []
    for ranks, workers in others:
        rows, place = run(source, place, 12 // ranks, ranks, workers, 5, 2)
        resumed += rows
    assert resumed == undisturbed[: len(resumed)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 60), st.data())
def test_ranks_and_workers_open_streams_of_their_own_and_each_stream_has_its_turn(
    size, ranks, workers, documents, data
):
    streams = divide(source_of([1] * documents).choose_streams, BatchSlice(size, 0, ranks, workers))
    slots = size * ranks * workers
    assert streams.count * streams.in_a_row == slots
    opened = {}
    for rank in range(ranks):
        for worker in range(workers):
            share = BatchSlice(size, rank, ranks, workers)
            numbers = [n for step in range(worker, 4 * workers, workers) for n in share.of(slots, step)]
            opened[rank, worker] = {streams.place(n)[0] for n in numbers}
    if documents >= ranks * workers:
        assert sum(map(len, opened.values())) == streams.count == len(set.union(*opened.values()))
        assert documents < slots or streams.count == slots
    else:
        assert streams.count == 1
    n = data.draw(st.integers(0, 1000))
    windows = [streams.place(i)[1] for i in range(n) if streams.place(i)[0] == 0]
    assert windows == list(range(len(windows)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.integers(1, 200))
def test_a_source_has_its_share_of_any_first_rows(weights, rows):
    found = Counter(source_of_row(row, weights) for row in range(rows))
    for source, weight in enumerate(weights):
        assert abs(found[source] - rows * weight / sum(weights)) < len(weights)
        assert weight or not found[source]
