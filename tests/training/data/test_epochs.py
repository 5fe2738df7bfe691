"""Every document is read once per epoch, for any batch size, ranks, workers and packing, also after a resume."""

import multiprocessing
import os
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import data_sources, process_groups
from titanplans.config.sections.data import Data
from titanplans.errors import DataError
from titanplans.loss import IGNORED
from titanplans.split.objects import gather_objects

SEQ_LEN = 24
SOURCES = {"a": (57, "0123456789", 3), "b": (23, "uvwxyz", 17), "c": (6, "klmn", 40)}
"""By source: the number of documents, their letters, and the fewest words of a document.

The longest document of each source is longer than a sequence.
"""


def texts(name):
    count, words, least = SOURCES[name]
    return [" ".join((words * 20)[i : i + least + (5 * i) % 19]) for i in range(count)]


def write(folder: Path) -> Data:
    """Write two sources of rows and one of text files; return their mixture."""
    for name in "ab":
        data_sources.write_rows(folder / f"{name}.jsonl", [{"text": text} for text in texts(name)])
    (folder / "c").mkdir()
    for index, text in enumerate(texts("c")):
        (folder / "c" / f"{index}.txt").write_text(text)
    paths = {"a": "a.jsonl", "b": "b.jsonl", "c": "c"}
    sources = [
        {"name": name, "dataset_path": str(folder / path), "dataset_split": "all", "weight": weight}
        for (name, path), weight in zip(paths.items(), (3.0, 1.0, 0.5), strict=True)
    ]
    return Data(documents="apart", sources=sources)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("epochs"))


def build(data, batch, *, epochs=1, **options):
    return data_sources.build(data, seq_len=SEQ_LEN, batch=batch, epochs=epochs, **options)


def predicted_pairs(batches) -> Counter:
    """Return how often each pair of a token and its label, the next token, occurs."""
    pairs: Counter = Counter()
    for inputs, labels in batches:
        is_predicted = labels != IGNORED
        pairs.update(zip(inputs["input"][is_predicted].tolist(), labels[is_predicted].tolist(), strict=True))
    return pairs


def expected_pairs(names, epochs) -> Counter:
    tokenizer = data_sources.tokenizer()
    pairs: Counter = Counter()
    for text in (text for name in names for text in texts(name)):
        tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
        pairs.update({pair: n * epochs for pair, n in Counter(pairwise(tokens)).items()})
    return pairs


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 16), st.integers(1, 16), st.sampled_from(["cut", "best_fit"]), st.integers(1, 2),
    st.sampled_from(["a", "abc"]), st.integers(0, 40),
)  # fmt: skip
def test_every_document_is_read_once_per_epoch(data, batch, other_batch, packing, epochs, names, stop):
    data = data.replace(
        packing=packing, sources=tuple(source for source in data.sources if source.name in names)
    )
    first = build(data, batch, epochs=epochs)
    batches = iter(first)
    read = predicted_pairs(islice(batches, stop))
    state = first.state_dict()
    assert read + predicted_pairs(batches) == expected_pairs(names, epochs)
    assert first.epochs_read() == {
        name: (epochs, f"{epochs}.00 epochs, {epochs * SOURCES[name][0]} documents of {SOURCES[name][0]}")
        for name in names
    }
    second = build(data, other_batch, epochs=epochs)
    second.load_state_dict(state)
    assert read + predicted_pairs(second) == expected_pairs(names, epochs)


def test_only_the_last_batch_is_padded(data):
    *full_batches, last = build(data, 7)
    is_full = [(labels != IGNORED).any(1).all() for _, labels in full_batches]
    assert all(is_full)
    assert (last[1] != IGNORED).any()
    assert last[1].shape == (7, SEQ_LEN)


def test_workers_read_the_same_documents_once(data):
    for options in ({}, {"persistent_workers": True}):
        assert predicted_pairs(build(data, 6, workers=2, **options)) == expected_pairs("abc", 1)


def test_a_source_keeps_its_weight_until_another_is_exhausted(data):
    batches = list(build(data, 9))
    tokenizer = data_sources.tokenizer()
    sequences = [
        tokenizer.decode(sequence.tolist()) for inputs, _ in batches[:3] for sequence in inputs["input"]
    ]
    assert sum(bool(set(sequence) & set("0123456789")) for sequence in sequences) / len(
        sequences
    ) == pytest.approx(2 / 3, abs=0.04)


def on_two_ranks(rank: int) -> list[dict]:
    """Return the pairs that this rank reads: uninterrupted, with workers, and resumed with another batch size."""
    multiprocessing.set_start_method("fork", force=True)  # data workers are forked, as in a job
    data, results = write(Path(os.environ["TEST_FOLDER"]) / str(rank)), {}
    for batch, workers, packing in ((2, 0, "cut"), (10, 0, "best_fit"), (6, 2, "cut"), (4, 1, "best_fit")):
        packed = data.replace(packing=packing)
        uninterrupted = predicted_pairs(build(packed, batch, rank=rank, ranks=2, workers=workers))
        for stop in (0, 3, 11):
            first = build(packed, batch, rank=rank, ranks=2, workers=workers)
            before = predicted_pairs(islice(iter(first), stop))
            second = build(packed, 2 * batch, rank=rank, ranks=2, workers=workers)
            second.load_state_dict(first.state_dict())
            results[batch, stop] = before + predicted_pairs(second)
        results[batch, None] = uninterrupted
    try:
        broken = build(data, 4, rank=rank, ranks=2)
        for step, _ in enumerate(iter(broken)):
            if step == 2 and rank == 1:
                for file in (Path(os.environ["TEST_FOLDER"]) / "1" / "c").iterdir():
                    file.write_text("")
        results["error"] = None
    except DataError as error:
        results["error"] = str(error)
    return gather_objects(results)


def test_ranks_together_read_every_document_once_and_fail_together(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    os.environ["TEST_FOLDER"] = str(tmp_path)
    of_rank_0, of_rank_1 = process_groups.run(on_two_ranks, 2)
    errors = of_rank_0.pop("error"), of_rank_1.pop("error")
    for case, read in of_rank_0.items():
        assert read + of_rank_1[case] == expected_pairs("abc", 1), case
    assert errors[0] == errors[1]
    assert "it was truncated while it was read" in errors[0]


def test_the_loader_does_not_use_the_default_random_generator(data):
    """A job that resumes after the end of the first reader draws the same random numbers as an uninterrupted one."""
    batches = iter(build(data, 8))
    next(batches)
    state = torch.get_rng_state()
    list(batches)
    assert torch.equal(torch.get_rng_state(), state)
