"""Errors of data before a job starts: one line each, with key, value and remedy."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.data_sources import check_dataset, open_source, write_rows
from tests.support.paths import ROOT
from tests.support.refusals import refusal
from titanplans.errors import DataError
from titanplans.training.data.checks import read_position
from titanplans.training.data.vocabulary import check_tokenizer, default_tokenizer_path

refused = partial(refusal, kind=DataError)


def test_usable_data_sets_pass(tmp_path):
    check_dataset("stdlib", split="validation", seq_len=2048)
    rows = write_rows(tmp_path / "train.jsonl", [{"body": f"text {i} " * 9} for i in range(40)])
    for split in ("train", "validation", "all"):
        check_dataset("json", rows, split=split, text_column="body", seq_len=16)
    check_dataset(str(tmp_path), text_column="body")
    check_dataset("owner/name", str(tmp_path), text_column="body")


@pytest.mark.parametrize(
    ("names", "split", "message"),
    [
        (("local", "nowhere"), "train", "dataset_path = 'nowhere': no such file or folder"),
        (("stdlib", "nowhere"), "train", "dataset_path = 'nowhere'"),
        (("local", "empty"), "train", "dataset_path = 'empty': there is no file"),
        (("local", "empty/*.jsonl"), "train", "dataset_path = 'empty/*.jsonl': there is no file"),
        (("local", "empty/**/*.txt"), "train", "dataset_path = 'empty/**/*.txt': there is no file"),
        (("local", "/"), "train", "dataset_path = '/': "),
        (("local", "/proc"), "train", "dataset_path = '/proc': "),
        (("parquet",), "train", "dataset = 'parquet': needs a dataset_path"),
        (("local", "csv"), "train", "holds .csv; the supported extensions are .txt, .md, .py, .jsonl, .json, .parquet"),
        (("stdlib",), "test", "dataset_split = 'test': a local corpus has the splits 'train', 'validation', 'all'"),
        (("local", "one/train.jsonl"), "dev", "dataset_split = 'dev'"),
        (("local", "one/train.jsonl"), "train", "holds no document for dataset_split = 'train'"),
        (("local", "one.txt"), "train", "holds no document"),
        (("./one",), "dev", "can't be opened (ValueError"),
    ],
)  # fmt: skip
def test_paths_and_splits_without_a_corpus_are_refused(tmp_path, monkeypatch, names, split, message):
    monkeypatch.chdir(tmp_path)
    for file, text in (("empty/empty.txt", ""), ("csv/a.csv", "text\nx\n"), ("one.txt", "alone")):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(text)
    Path("one").mkdir()
    write_rows(Path("one/train.jsonl"), [{"text": "alone"}])
    assert message in refused(check_dataset, *names, split=split)


def test_too_few_tokens_for_one_sequence_are_refused(tmp_path):
    (tmp_path / "short.txt").write_text("import os\n")
    path = str(tmp_path / "short.txt")
    message = refused(check_dataset, "local", path, seq_len=128, split="all")
    assert message.startswith("seq_len = 128: dataset = ")
    assert "too few for one sequence" in message
    check_dataset("local", path, seq_len=2, split="all")


def test_a_name_that_the_hub_can_not_load_is_refused_with_the_reason():
    # In a new process, because the libraries read HF_HUB_OFFLINE at import.
    code = "from tests.support.data_sources import check_dataset; check_dataset('nobody/nothing')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "DataError: dataset = 'nobody/nothing': can't be opened (" in last
    assert "offline" in last.lower()
    assert "give 'stdlib', " in last


def test_tokenizers_are_checked(tmp_path):
    assert check_tokenizer(default_tokenizer_path()) == 4096
    remedy = f"the default is {default_tokenizer_path()!r}"
    for path, reason in {
        tmp_path / "nowhere": "no tokenizer.json can be read there (No such file or directory)",
        tmp_path: "no tokenizer.json can be read there (No such file or directory)",
        default_tokenizer_path() + "/tokenizer.json": "no tokenizer.json can be read there (Not a directory)",
    }.items():
        message = refused(check_tokenizer, str(path))
        assert message.startswith(f"hf_assets_path = {str(path)!r}: {reason}")
        assert remedy in message
    os.mkfifo(tmp_path / "tokenizer.json")
    assert "tokenizer.json is not a file" in refused(check_tokenizer, str(tmp_path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_with_a_pickled_data_position_is_refused(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    ranks = {f"dp_rank_{rank}": b"state" for rank in range(2)}
    loaders = ranks | {"world_size": 2}
    dcp.save({"dataloader": loaders, "w": torch.ones(1)}, checkpoint_id=tmp_path / "step-1")
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "weights")
    assert read_position(tmp_path / "weights") == {}
    message = refused(read_position, tmp_path / "step-1")
    assert "is a pickle for each" in message
    assert "exclude_from_loading" in message


GOOD = b'{"text": "a quick brown fox", "id": 1}\n' * 50


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (b"null\n", "line 1 holds no value"),  # pyarrow would end the process at this line
        (GOOD + b"[1]\n", "line 51 holds a value of type list"),
        (GOOD * 4000 + b'{"text": 3}\n', "line 200001 holds a value of type int"),
        (b'["a"]\n["b"]\n', "can't be read as json (JSONDecodeError: Extra data"),
    ],
)
def test_lines_that_are_no_rows_are_refused(tmp_path, lines, reason):
    (tmp_path / "rows.jsonl").write_bytes(lines)
    assert reason in refused(check_dataset, "local", str(tmp_path / "rows.jsonl"), split="all")


@pytest.mark.parametrize(
    "content",
    [
        b"\n\n" + GOOD,
        GOOD + b'{"text": "no id"}\n{"text": "another type", "id": "x"}\n',
        b'[{"text": "a"}, {"text": "b"}]',
        json.dumps([{"text": "a"}], indent=1).encode(),
        b'["a", "b"]',
    ],
)
def test_json_with_rows_is_accepted(tmp_path, content):
    (tmp_path / "rows.json").write_bytes(content)
    check_dataset("local", str(tmp_path / "rows.json"), split="all")


def test_a_nested_field_may_be_the_text(tmp_path):
    rows = [{"content": {"body": f"text {i}"}} for i in range(3)]
    write_rows(tmp_path / "a.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "hub").mkdir()
    write_rows(tmp_path / "hub" / "train.jsonl", rows)
    for dataset, path in (
        ("local", tmp_path / "a.jsonl"), ("local", tmp_path / "a.parquet"), (str(tmp_path / "hub"), None),
    ):  # fmt: skip
        split = "all" if path else "train"
        source = open_source(dataset, path and str(path), split=split, text_column="content.body")
        assert sorted(text for _, text in source.documents(0, 0, 1, None)) == ["text 0", "text 1", "text 2"]
    for name, kind in (
        ("content.title", "no value"),
        ("content", "type dict"),
        ("content.body.x", "no value"),
    ):
        for file in ("a.jsonl", "a.parquet"):
            path = str(tmp_path / file)
            assert kind in refused(check_dataset, "local", path, split="all", text_column=name)


TOKENIZER = json.loads((Path(default_tokenizer_path()) / "tokenizer.json").read_text())


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", json.dumps(TOKENIZER)[:900], "tokenizer.json is not a tokenizer ("),
        ("tokenizer_config.json", "[1]", "its tokenizer can't be used (AttributeError"),
        ("tokenizer_config.json", {"bos_token": 3}, "its tokenizer can't be used (ValueError"),
        ("chat_template.jinja", b"\xff", "no chat_template.jinja can be read there (UnicodeDecodeError"),
    ],
)
def test_broken_tokenizers_are_refused(tmp_path, name, content, reason):
    for file in Path(default_tokenizer_path()).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.dumps(content) if isinstance(content, dict) else content
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert reason in refused(check_tokenizer, str(tmp_path))


def test_a_tokenizer_that_can_not_encode_the_text_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"type": "WordLevel", "vocab": {"a": 9}, "unk_token": "?"}}'
    )
    (tmp_path / "b.txt").write_text("b")
    assert check_tokenizer(str(tmp_path)) == 10, "ids leave gaps"
    options = {"split": "all", "tokenizer_path": str(tmp_path), "seq_len": 2}
    message = refused(check_dataset, "local", str(tmp_path / "b.txt"), **options)
    assert "can't read the text (Exception: WordLevel" in message
