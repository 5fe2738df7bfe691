"""Mixtures: each row is one source's, by weight, the same on any layout; best fit; the end of a source."""

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
    """Sources whose rows tell which is which: a has digits, b letters, of other lengths."""
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


def rows(batches):
    return [row.tolist() for inputs, _ in batches for row in inputs["input"]]


def global_batches(loaders, steps):
    """Return the rows of some global batches, those of all ranks in their order."""
    every = [list(islice(iter(loader), steps)) for loader in loaders]
    return [rows(batches[step] for batches in every) for step in range(steps)]


def of_source(tokenizer, row):
    return "a" if set(tokenizer.decode(row)) & set("0123456789") else "b"


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_it_resumes_on_another_layout_at_any_step(build, data, packing):
    data = data.replace(packing=packing)
    whole = global_batches([build(data)], 12)
    for stop in (1, 5, 8):
        first = build(data)
        list(islice(iter(first), stop))
        state, loaders = first.state_dict(), [build(data, rank=r, ranks=2) for r in range(2)]
        for loader in loaders:
            loader.load_state_dict(state)
        assert global_batches(loaders, 12 - stop) == whole[stop:]


def test_rows_are_of_the_sources_by_weight_in_each_batch_and_stream(build, data, tokenizer):
    batches = global_batches([build(data)], 40)
    found = np.array([[of_source(tokenizer, row) == "a" for row in batch] for batch in batches])
    assert found.mean() == 0.75
    assert set(found.sum(1)) == {6}, "of 8 rows"
    assert set(found.sum(0)) == {30}, "of 40 in each reader"


def test_weights_may_change_and_count_from_there_on(build, data, tokenizer):
    first = build(data)
    global_batches([first], 8)
    even = data.replace(sources=tuple(source.replace(weight=1.0) for source in data.sources))
    second = build(even)
    second.load_state_dict(first.state_dict())
    after = global_batches([second], 8)
    assert [sum(of_source(tokenizer, row) == "a" for row in batch) for batch in after] == [4] * 8


def test_what_is_not_resumed(build, data):
    state = build(data).state_dict()
    few = data.sources[0].replace(name="few", dataset_split="validation")  # 4 documents
    with pytest.raises(DataError, match=r"^data.sources, few: it has fewer documents than the 8 readers"):
        build(data.replace(sources=(*data.sources, few))).load_state_dict(state)
    other = (data.sources[0].replace(dataset_split="train"), data.sources[1])
    with pytest.raises(DataError, match=r"^split of a = 'train': the checkpoint's data loader had 'all'"):
        build(data.replace(sources=other)).load_state_dict(state)


def test_sources_come_go_move_and_pause_by_name(build, data, tokenizer):
    """Each source goes on where it stopped, whichever sources are added or left out; a line names the change."""
    a, b = data.sources
    alone = {of.name: global_batches([build(data.replace(sources=(of,)))], 14) for of in (a, b)}
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
            found = [row for row in rows_of if of_source(tokenizer, row) == name]
            assert found == [batch[reader] for batch in alone[name]][: len(found)]
            assert found


def test_a_pass_reads_every_source_whole(build, data, tokenizer):
    def read(data):
        batches = build(data, infinite=False)
        return sorted(row for x, y in batches for row in x["input"][(y != IGNORED).any(1)].tolist())

    seen = read(data)
    assert seen == sorted(row for source in data.sources for row in read(data.replace(sources=(source,))))
    assert {of_source(tokenizer, row) for row in seen} == {"a", "b"}


def test_figures_count_tokens_of_each_source_padding_and_what_is_long(build, data):
    loader = build(data.replace(packing="best_fit", long_documents="drop"), seq_len=56)
    batches = list(islice(iter(loader), 20))
    found = loader.take_metrics()
    tokens = sum(int((inputs["positions"] >= 0).sum()) for inputs, _ in batches)
    assert found["data/tokens/a"] + found["data/tokens/b"] == pytest.approx(
        tokens * (1 - found["data/padding(%)"] / 100)
    )
    assert 0 < found["data/padding(%)"] < 40
    assert found["data/long_documents/b"] > 0
    assert loader.take_metrics()["data/tokens/a"] == 0
    assert build(data.replace(sources=data.sources[:1])).take_metrics() == {}


def test_a_source_of_nothing_but_long_documents_is_refused(build, data):
    dropping = data.replace(packing="best_fit", long_documents="drop")
    with pytest.raises(DataError, match=r"holds no document within seq_len = 2 tokens"):
        next(iter(build(dropping, seq_len=2)))


def test_a_job_of_best_fit_goes_on_at_another_length(build, data):
    """Whatever the length was before, `epochs` reads every token of every document once."""
    data = data.replace(packing="best_fit")

    def pairs(batches):
        rows = [(x[y != IGNORED], y[y != IGNORED]) for inputs, y in batches for x in [inputs["input"]]]
        return [pair for x, y in rows for pair in zip(x.tolist(), y.tolist(), strict=True)]

    once = data.replace(exhausted="end")
    whole = sorted(pairs(build(once)))
    for steps in (1, 3):
        found, first = [], build(once)
        found += pairs(islice(iter(first), steps))
        second = build(once, seq_len=17)
        second.load_state_dict(first.state_dict())
        found += pairs(islice(iter(second), steps))
        third = build(once, seq_len=64)
        third.load_state_dict(second.state_dict())
        assert sorted(found + pairs(third)) == whole


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
def test_options_that_contradict_each_other(values, option):
    with pytest.raises(OptionError) as refused:
        Data(**values)
    assert refused.value.option == option


def test_rows_tell_where_documents_begin(build, data):
    inputs, labels = next(iter(build(data)))
    starts = inputs["positions"][:, 1:] == 0
    assert starts.any()
    assert torch.equal(labels[:, :-1][starts], torch.full_like(labels[:, :-1][starts], IGNORED))
