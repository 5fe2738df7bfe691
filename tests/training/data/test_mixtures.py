"""Mixtures: each sequence has one source, which is chosen by weight and is the same for any number of ranks.

Best-fit packing and sources that end are tested, too.
"""

from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch

from tests.support import data_sources
from titanplans.config.sections.data import Data
from titanplans.errors import DataError, OptionError
from titanplans.loss import IGNORED

SEQ_LEN = 32


@pytest.fixture(scope="module")
def tokenizer():
    return data_sources.tokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return two sources that can be told apart: a has digits, b has letters and longer documents."""
    folder = tmp_path_factory.mktemp("sources")
    for name, column, words, least in (("a", "text", "0123456789", 2), ("b", "body", "uvwxyz", 30)):
        rows = [{column: " ".join((words * 20)[i : i + least + i % 40])} for i in range(80)]
        data_sources.write_rows(folder / f"{name}.jsonl", rows)
    sources = [
        {"name": "a", "dataset_path": str(folder / "a.jsonl"), "dataset_split": "all", "weight": 3.0},
        {"name": "b", "dataset_path": str(folder / "b.jsonl"), "dataset_split": "all", "text_column": "body"},
    ]
    return Data(documents="apart", sources=sources)


@pytest.fixture
def build():
    return partial(data_sources.build, seq_len=SEQ_LEN)


def sequences(batches):
    return [sequence.tolist() for inputs, _ in batches for sequence in inputs["input"]]


def global_batches(loaders, steps):
    """Return the sequences of each of the first `steps` global batches, in the order of the ranks."""
    by_rank = [list(islice(iter(loader), steps)) for loader in loaders]
    return [sequences(batches[step] for batches in by_rank) for step in range(steps)]


def of_source(tokenizer, sequence):
    return "a" if set(tokenizer.decode(sequence)) & set("0123456789") else "b"


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_it_resumes_on_other_ranks_at_any_step(build, data, packing):
    data = data.replace(packing=packing)
    uninterrupted = global_batches([build(data)], 12)
    for stop in (1, 5, 8):
        first = build(data)
        list(islice(iter(first), stop))
        state, loaders = first.state_dict(), [build(data, rank=r, ranks=2) for r in range(2)]
        for loader in loaders:
            loader.load_state_dict(state)
        assert global_batches(loaders, 12 - stop) == uninterrupted[stop:]


def test_sequences_are_of_the_sources_by_weight_in_each_batch_and_reader(build, data, tokenizer):
    batches = global_batches([build(data)], 40)
    is_of_a = np.array([[of_source(tokenizer, sequence) == "a" for sequence in batch] for batch in batches])
    assert is_of_a.mean() == 0.75
    assert set(is_of_a.sum(1)) == {6}, "of 8 sequences"
    assert set(is_of_a.sum(0)) == {30}, "of 40 in each reader"


def test_changed_weights_apply_from_the_resume_on(build, data, tokenizer):
    first = build(data)
    global_batches([first], 8)
    even = data.replace(sources=tuple(source.replace(weight=1.0) for source in data.sources))
    second = build(even)
    second.load_state_dict(first.state_dict())
    after = global_batches([second], 8)
    assert [sum(of_source(tokenizer, sequence) == "a" for sequence in batch) for batch in after] == [4] * 8


def test_sources_that_can_not_be_resumed_are_refused(build, data):
    state = build(data).state_dict()
    few = data.sources[0].replace(name="few", dataset_split="validation")  # 4 documents
    with pytest.raises(
        DataError,
        match=r"^data.sources, few: it has fewer documents than there are readers in the checkpoint \(8\)",
    ):
        build(data.replace(sources=(*data.sources, few))).load_state_dict(state)
    changed = (data.sources[0].replace(dataset_split="train"), data.sources[1])
    with pytest.raises(DataError, match=r"^split of a = 'train': the checkpoint's data loader had 'all'"):
        build(data.replace(sources=changed)).load_state_dict(state)


def test_sources_are_added_removed_and_moved_by_name(build, data, tokenizer):
    """Each source continues where it stopped, whichever sources are added or removed, and a log line names the change."""
    a, b = data.sources
    alone = {source.name: global_batches([build(data.replace(sources=(source,)))], 14) for source in (a, b)}
    taken, state = [], None
    for sources, message in (
        ((a,), None),
        ((b, a), '{"b" = 1.0, "a" = 3.0} from here on, and had {"a" = 3.0}'),
        ((a, b), None),
        ((a.replace(weight=0.0), b), '{"a" = 0.0, "b" = 1.0} from here on, and had {"a" = 3.0, "b" = 1.0}'),
        ((a.replace(weight=1.0), b), '{"a" = 1.0, "b" = 1.0} from here on, and had {"a" = 0.0, "b" = 1.0}'),
        ((a.replace(weight=1.0),), '{"a" = 1.0} from here on, and had {"a" = 1.0, "b" = 1.0}'),
    ):
        loader = build(data.replace(sources=sources))
        if state is not None:
            assert loader.check_state(state)[1] == (
                [f"data.sources have the weights {message}"] if message else []
            )
            loader.load_state_dict(state)
        taken += global_batches([loader], 2)
        state = loader.state_dict()
    for reader, rows_of in enumerate(zip(*taken, strict=True)):
        for name in "ab":
            of_name = [sequence for sequence in rows_of if of_source(tokenizer, sequence) == name]
            assert of_name == [batch[reader] for batch in alone[name]][: len(of_name)]
            assert of_name


def test_a_pass_reads_every_source_to_its_end(build, data, tokenizer):
    def read(data):
        batches = build(data, infinite=False)
        return sorted(sequence for x, y in batches for sequence in x["input"][(y != IGNORED).any(1)].tolist())

    of_mixture = read(data)
    assert of_mixture == sorted(
        sequence for source in data.sources for sequence in read(data.replace(sources=(source,)))
    )
    assert {of_source(tokenizer, sequence) for sequence in of_mixture} == {"a", "b"}


def test_metrics_count_tokens_of_each_source_padding_and_long_documents(build, data):
    loader = build(data.replace(packing="best_fit", long_documents="drop"), seq_len=56)
    batches = list(islice(iter(loader), 20))
    metrics = loader.take_metrics()
    tokens = sum(int((inputs["positions"] >= 0).sum()) for inputs, _ in batches)
    assert metrics["data/tokens/a"] + metrics["data/tokens/b"] == pytest.approx(
        tokens * (1 - metrics["data/padding(%)"] / 100)
    )
    assert 0 < metrics["data/padding(%)"] < 40
    assert metrics["data/long_documents/b"] > 0
    assert loader.take_metrics()["data/tokens/a"] == 0
    assert build(data.replace(sources=data.sources[:1])).take_metrics() == {}


def test_a_source_with_only_long_documents_is_refused(build, data):
    dropping = data.replace(packing="best_fit", long_documents="drop")
    with pytest.raises(DataError, match=r"holds no document within seq_len = 2 tokens"):
        next(iter(build(dropping, seq_len=2)))


def test_best_fit_resumes_at_another_length(build, data):
    """For any earlier length, `epochs` reads every token of every document once."""
    data = data.replace(packing="best_fit")

    def pairs(batches):
        sequences = [(x[y != IGNORED], y[y != IGNORED]) for inputs, y in batches for x in [inputs["input"]]]
        return [pair for x, y in sequences for pair in zip(x.tolist(), y.tolist(), strict=True)]

    once = data.replace(exhausted="end")
    expected = sorted(pairs(build(once)))
    for steps in (1, 3):
        read, first = [], build(once)
        read += pairs(islice(iter(first), steps))
        second = build(once, seq_len=17)
        second.load_state_dict(first.state_dict())
        read += pairs(islice(iter(second), steps))
        third = build(once, seq_len=64)
        third.load_state_dict(second.state_dict())
        assert sorted(read + pairs(third)) == expected


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"sources": [{"weight": -1.0}]}, "data.sources.weight"),
        ({"sources": [{"weight": 0.0}]}, "data.sources"),
        ({"sources": [{}, {}]}, "data.sources"),
        ({"long_documents": "drop"}, "data.long_documents"),
        ({"sources": [{"text_column": "x", "chat": {"enable": True}}]}, "data.sources.text_column"),
    ],
)
def test_contradictory_options_are_refused(values, option):
    with pytest.raises(OptionError) as refused:
        Data(**values)
    assert refused.value.option == option


def test_positions_mark_where_documents_begin(build, data):
    inputs, labels = next(iter(build(data)))
    starts = inputs["positions"][:, 1:] == 0
    assert starts.any()
    assert torch.equal(labels[:, :-1][starts], torch.full_like(labels[:, :-1][starts], IGNORED))
