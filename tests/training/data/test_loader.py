"""The loader's batches on all ranks, and that it resumes exactly where it stopped."""

import json
import os
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from multiprocessing import active_children

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.support import data_sources
from tests.support.data_sources import open_source, with_workers, write_rows
from titanplans.config.sections.data import Chat
from titanplans.errors import DataError
from titanplans.training.checkpoint.storage import Planner
from titanplans.training.data.checks import read_position
from titanplans.training.data.loader import TextDataLoader
from titanplans.training.data.vocabulary import default_tokenizer_path
from titanplans.training.launch.orphans import end_with_rank

# Short documents and short sequences: an epoch ends every few batches, and most batches begin and end inside a
# document.
TEXTS = [f"def f{i}(x):\n" + f"    return x + {i}\n" * (1 + 7 * i % 5) for i in range(30)]
SEQ_LEN, BATCH = 16, 2
# Conversations of at most 17 tokens, so that two fit into some sequences, and one conversation that is too long.
CHATS = [
    [{"role": "user", "content": f"f{i}" * (1 + i % 3)}, {"role": "assistant", "content": f"x + {i}"}]
    for i in range(30)
]
CHATS.insert(3, [{"role": "user", "content": "a very long one " * 8}, {"role": "assistant", "content": "x"}])
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture
def tokenizer():
    return data_sources.tokenizer()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Return configs of 30 documents (text files, rows, a streamed data set of four files) and of conversations."""
    root = tmp_path_factory.mktemp("corpora")
    for folder in ("text", "reader", "chats"):
        (root / folder).mkdir()
    for i, text in enumerate(TEXTS):
        (root / "text" / f"{i}.txt").write_text(text)
    texts, chats = [{"text": text} for text in TEXTS], [{"messages": messages} for messages in CHATS]
    for name, folder, rows in (("rows", "reader", texts), ("chats", "chats", chats)):
        write_rows(root / f"{name}.jsonl", rows)
        for i in range(4):
            write_rows(root / folder / f"train-{i}.jsonl", rows[i::4])
    (root / "chat.jinja").write_text(TEMPLATE)
    chat = Chat(enable=True, chat_template=str(root / "chat.jinja"))
    return {
        "chats": data_sources.config(
            dataset="local", dataset_path=str(root / "chats.jsonl"), split="all", chat=chat
        ),
        "streamed chats": data_sources.config(dataset=str(root / "chats"), chat=chat),
        "text": data_sources.config(dataset="local", dataset_path=str(root / "text"), split="all"),
        "rows": data_sources.config(dataset="local", dataset_path=str(root / "rows.jsonl"), split="all"),
        "reader": data_sources.config(dataset=str(root / "reader")),
        "stdlib": data_sources.config(),
    }


@pytest.fixture
def build(tokenizer):
    def build(config, *, dp_rank=0, dp_world_size=1, **sizes):
        sizes = {"seq_len": SEQ_LEN, "local_batch_size": BATCH} | sizes
        return TextDataLoader(
            config, dp_rank=dp_rank, dp_world_size=dp_world_size, tokenizer=tokenizer, **sizes
        )

    return build


def flat(batches):
    """Return batches as nested lists, which compare exactly."""
    return [(b["input"].tolist(), b["positions"].tolist(), labels.tolist()) for b, labels in batches]


# --- batches


@pytest.mark.parametrize("name", ["text", "rows", "reader", "stdlib"])
def test_each_sequence_of_a_batch_has_the_documents_of_a_reader_in_order(build, corpora, tokenizer, name):
    config = corpora[name]
    (data_source,) = config.data.sources
    source = open_source(data_source.dataset, data_source.dataset_path, data_source.dataset_split)
    batches = list(islice(build(config), 12))
    for sequence in range(BATCH):
        documents = (
            tokenizer.encode(text, add_bos=True, add_eos=True)
            for _, text in source.documents(0, sequence, BATCH, None)
        )
        expected = list(chain.from_iterable(islice(documents, 12)))
        inputs = torch.cat([b["input"][sequence] for b, _ in batches])[: len(expected) - 1]
        labels = torch.cat([labels[sequence] for _, labels in batches])[: len(expected) - 1]
        assert len(inputs) > 150
        assert inputs.tolist() == expected[: len(inputs)]
        assert labels.tolist() == expected[1 : len(labels) + 1]
        assert expected[0] == tokenizer.bos_id
        assert tokenizer.eos_id in expected


def test_one_pass_over_any_number_of_ranks_predicts_every_token_once(build, corpora):
    def predictions(batches):
        """Return counts of sequences by their predicted tokens; padding is left out."""
        sequences = Counter()
        for inputs, labels in batches:
            for x, y in zip(inputs["input"], labels, strict=True):
                is_predicted = y != IGNORE_INDEX
                if is_predicted.any():
                    sequences[tuple(x[is_predicted].tolist()), tuple(y[is_predicted].tolist())] += 1
        return sequences

    of_one_rank = predictions(build(replace(corpora["text"], infinite=False)))
    assert of_one_rank.total() > 20
    for ranks, workers in ((2, 0), (3, 0), (2, 2)):
        config = with_workers(replace(corpora["text"], infinite=False), workers)
        by_rank = [list(build(config, dp_rank=rank, dp_world_size=ranks)) for rank in range(ranks)]
        assert len({len(batches) for batches in by_rank}) == 1, "a rank would wait for another forever"
        assert sum(map(predictions, by_rank), Counter()) == of_one_rank
        for step in zip(*by_rank, strict=True):  # the mean over tokens of a step is never 0 / 0
            assert any((labels != IGNORE_INDEX).any() for _, labels in step)


def test_one_pass_is_the_same_for_any_number_of_workers_and_can_be_repeated(build, corpora):
    config = replace(corpora["text"], infinite=False)
    loader = build(config)
    expected = flat(loader)
    assert flat(loader) == expected
    assert flat(build(with_workers(config, 2))) == expected
    persistent = build(with_workers(config, 1, persistent=True))
    batches = iter(persistent)
    before = flat(islice(batches, 2))
    state = persistent.state_dict()
    assert flat(persistent) == expected
    assert flat(persistent) == expected
    assert before == expected[:2]
    resumed = build(with_workers(config, 1, persistent=True))
    resumed.load_state_dict(state)
    assert flat(resumed) == expected[2:]
    assert flat(resumed) == expected


def test_data_without_text_raise_instead_of_searching_forever(build, corpora, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "only one"}\n')
    config = data_sources.config(dataset=str(tmp_path))
    with pytest.raises(DataError, match="holds no text for reader 1 of 2"):
        next(iter(build(config, dp_rank=1, dp_world_size=2)))


# --- resuming


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["text", "rows", "reader", "stdlib", "chats", "streamed chats"])
def test_a_resumed_loader_continues_bit_for_bit(build, corpora, name, workers):
    config = with_workers(corpora[name], workers)
    rank_options = {"dp_rank": 1, "dp_world_size": 2}
    # Each rank has about 12 batches per epoch, so 40 batches cross the end of an epoch more than twice.
    expected = flat(islice(build(config, **rank_options), 46))
    if name not in ("stdlib", "streamed chats"):  # these have the same order in each epoch
        assert len({json.dumps(batch) for batch in expected}) == 46, "epochs have different orders"
    for k in (0, 1, 7, 12, 23, 40) if workers == 0 else (0, 13, 40):
        first = build(config, **rank_options)
        batches = iter(first)
        assert flat(islice(batches, k)) == expected[:k]
        state = first.state_dict()
        assert len(str(state)) < 4_000 or name == "stdlib", "a state is a position, not a buffer"
        second = build(config, **rank_options)
        second.load_state_dict(state)
        assert second.state_dict() == state or workers
        assert flat(islice(second, 6)) == expected[k : k + 6]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_state_survives_a_checkpoint_file(build, corpora, tmp_path):
    first = build(corpora["reader"])
    expected = flat(islice(first, 9))[5:]
    first = build(corpora["reader"])
    flat(islice(first, 5))
    dcp.save({"dataloader": first}, checkpoint_id=tmp_path)
    assert read_position(tmp_path) == {"place": first.state_dict()["place"]}
    second = build(corpora["reader"])
    dcp.load({"dataloader": second}, checkpoint_id=tmp_path, planner=Planner())  # this unpickles no code
    assert flat(islice(second, 4)) == expected


def test_a_state_within_a_step_is_that_of_its_beginning(build, corpora):
    config = replace(corpora["text"], global_batch_size=3 * BATCH)
    expected = flat(islice(build(config), 6))
    first = build(config)
    batches = iter(first)
    flat(islice(batches, 4))
    second = build(config)
    second.load_state_dict(first.state_dict())
    assert flat(islice(second, 3)) == expected[3:]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "workers"), [("text", 0), ("text", 2), ("chats", 0)])
def test_a_resumed_pass_ends_where_the_first_would_have(build, corpora, name, workers):
    config = with_workers(replace(corpora[name], infinite=False), workers)
    rank_options = {"dp_rank": 2, "dp_world_size": 3}
    expected = flat(build(config, **rank_options))
    assert IGNORE_INDEX in chain.from_iterable(expected[-1][2]), "the last batch of this rank is padded"
    for k in range(len(expected) + 1) if workers == 0 else (3, len(expected)):
        first = build(config, **rank_options)
        batches = iter(first)
        flat(islice(batches, k))
        second = build(config, **rank_options)
        second.load_state_dict(first.state_dict())
        assert flat(second) == expected[k:]
        assert flat(second) == expected, "the pass after a resumed one is a full one"


def test_resuming_tokenises_no_earlier_document(build, corpora, tokenizer, monkeypatch):
    encoded = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **kw: (encoded.append(text), encode(text, **kw))[1])
    sizes = {"seq_len": 512, "local_batch_size": 4}
    loader = build(corpora["stdlib"], **sizes)
    batches = iter(loader)
    encoded.clear()
    flat(islice(batches, 100))
    state, before = loader.state_dict(), len(encoded)
    next(batches)
    after = len(encoded) - before
    resumed = build(corpora["stdlib"], **sizes)
    resumed.load_state_dict(state)
    encoded.clear()
    next(iter(resumed))
    assert before > 30
    # Each reader also encodes two documents again: the one in which it stopped, and the next one, which may have the last
    # label.
    assert len(encoded) <= after + 2 * 4


# --- states that are refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_split": "train"}, r"^split = 'train': the checkpoint's data loader had 'all'"),
        ({"dataset": "stdlib", "dataset_path": None}, r"^dataset = 'stdlib': the checkpoint's .*text"),
        (None, r"^seed = 1: the checkpoint's data loader had 0"),
    ],
)
def test_a_state_of_other_data_is_refused(build, corpora, changes, message):
    config = corpora["text"]
    state = build(config).state_dict()
    changed = data_sources.other(config, **changes) if changes else replace(config, seed=1)
    with pytest.raises(DataError, match=message + ".*exclude_from_loading"):
        build(changed).load_state_dict(state)


def test_a_tokenizer_with_another_merge_is_refused(build, corpora, tmp_path):
    shutil.copytree(default_tokenizer_path(), tmp_path / "other")
    values = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    values["model"]["merges"].pop()  # the vocabulary size is unchanged
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(values))
    state = build(corpora["text"]).state_dict()
    changed = HuggingFaceTokenizer.Config().build(tokenizer_path=str(tmp_path / "other"))
    loader = TextDataLoader(
        corpora["text"],
        dp_rank=0,
        dp_world_size=1,
        tokenizer=changed,
        seq_len=SEQ_LEN,
        local_batch_size=BATCH,
    )
    with pytest.raises(DataError, match=r"^tokenizer = '4096 tokens, .*': .* had '"):
        loader.load_state_dict(state)
    del (values := json.loads(state["place"]))["version"]
    with pytest.raises(DataError, match="was written by another version"):
        loader.load_state_dict({"place": json.dumps(values)})


def test_a_corpus_that_changed_is_refused(build, tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    config = data_sources.config(dataset="local", dataset_path=str(tmp_path))
    first = build(config)
    flat(islice(first, 40))  # more than an epoch, so every document was read
    state = first.state_dict() | {}
    build(config).load_state_dict(state)
    (tmp_path / "3.txt").write_text(TEXTS[3].replace("x", "y"))  # the size is unchanged
    with pytest.raises(DataError, match=r"^since the checkpoint files have changed \(.*/3\.txt\), which "):
        build(config).load_state_dict(state)
    (tmp_path / "3.txt").write_text(TEXTS[3])
    moved = tmp_path.rename(tmp_path.parent / "moved")
    build(data_sources.other(config, dataset_path=str(moved))).load_state_dict(state)
    moved.rename(tmp_path)
    (tmp_path / "3.txt").unlink()
    (tmp_path / "90.txt").write_text("new")
    with pytest.raises(
        DataError, match=r"files are new \(.*/90\.txt\), files can't be found \(3\.txt\), which "
    ):
        build(config).load_state_dict(state)


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_a_file_repaired_after_the_position_is_accepted(build, tmp_path, packing):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    config = data_sources.config(dataset="local", dataset_path=str(tmp_path), split="all")
    config = replace(config, data=config.data.replace(packing=packing))
    sizes = {"seq_len": 8, "local_batch_size": 1}
    first = build(config, **sizes)
    before = flat(islice(first, 20))
    state, may = first.state_dict(), []
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text("repaired " + text)
        with suppress(DataError):
            _, (message,) = build(config, **sizes).check_state(state)
            assert f"{i}.txt); the text up to its position is the same" in message
            may.append(i)
        (tmp_path / f"{i}.txt").write_text(text)
    assert 5 < len(may) < 28
    for i in may:
        (tmp_path / f"{i}.txt").write_text("repaired " + TEXTS[i])
    uninterrupted = flat(islice(build(config, **sizes), 80))
    assert uninterrupted[:20] == before, "none of the files that change was read"
    second = build(config, **sizes)
    second.load_state_dict(state)
    assert flat(islice(second, 60)) == uninterrupted[20:]


def test_a_file_truncated_while_it_is_read_is_named(build, tmp_path):
    (tmp_path / "long.txt").write_text("a line of text\n" * 60_000)
    config = data_sources.config(dataset="local", dataset_path=str(tmp_path), split="all", seed=1)
    for workers in (0, 1):
        batches = iter(build(with_workers(config, workers), seq_len=1024))
        next(batches)
        with (tmp_path / "long.txt").open("r+b") as file:
            file.truncate(70_000)
        message = r"^[^\n]*long\.txt has 70,000 bytes, and had 900,000 when the job began: it was truncated while[^\n]*$"
        with pytest.raises(DataError, match=message):
            list(batches)
        (tmp_path / "long.txt").write_text("a line of text\n" * 60_000)


def test_an_empty_state_is_a_fresh_start(build, corpora):
    loader = build(corpora["text"])
    loader.load_state_dict({})
    assert flat(islice(loader, 2)) == flat(islice(build(corpora["text"]), 2))


def test_sequence_length_and_batch_size_may_change_between_runs(build, corpora):
    first = build(corpora["text"])
    before = [b["input"] for b, _ in islice(first, 10)]
    second = build(corpora["text"], seq_len=24, local_batch_size=1)
    second.load_state_dict(first.state_dict())
    after = [b["input"] for b, _ in islice(second, 10)]  # the two readers alternate
    uninterrupted = [b["input"] for b, _ in islice(build(corpora["text"]), 30)]
    for reader in range(BATCH):
        tokens = torch.cat([b[reader] for b in before] + [b[0] for b in after[reader::2]])
        assert torch.equal(tokens, torch.cat([b[reader] for b in uninterrupted])[: len(tokens)])


def test_a_worker_ends_only_when_its_rank_says_so(build, corpora):
    others = active_children()
    batches = iter(build(with_workers(corpora["text"], 1)))
    next(batches)
    (worker,) = set(active_children()) - set(others)
    subprocess.run(["kill", str(worker.pid)], check=True)  # as a scheduler signals every process
    list(islice(batches, 9))
    assert worker.is_alive()
    worker.terminate()  # as Python does, before it waits, when a process ends with an error
    worker.join(60)
    assert worker.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_worker_whose_rank_ended_early_ends_at_once():
    """If a worker looked up its parent only after the rank had ended, it would find another process and never end."""
    reading, writing = os.pipe()
    rank = os.fork()
    if rank == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                pass
            os.write(writing, b"asks")
            end_with_rank(parent, 0)
            os.write(writing, b"lives")
        os._exit(0)
    os.close(writing)
    os.waitpid(rank, 0)
    with os.fdopen(reading, "rb") as file:  # reads until the worker has ended, which closes the pipe
        assert file.read() == b"asks"
