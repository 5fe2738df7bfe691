"""Corpora: documents, splits, order and readers."""

import gzip
import json
import re
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.data_sources import open_source, write_rows
from tests.support.refusals import refusal
from titanplans.errors import DataError
from titanplans.training.data.corpus.column import FRAGMENT_BYTES
from titanplans.training.data.corpus.local import (
    TextFiles,
    find_files,
    in_split,
    split_names,
    stdlib_files,
    stdlib_root,
)

TEXTS = [f"Document {i}. " + f"word{i} " * (3 + 7 * i % 11) for i in range(45)]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


def write_texts(file: Path, texts: list[str]) -> str:
    return write_rows(file, [{"text": text} for text in texts])


def read(source, **kwargs) -> list[str]:
    where = {"epoch": 0, "reader": 0, "readers": 1, "start": None} | kwargs
    return [text for _, text in source.documents(**where)]


# --- splits


@given(st.lists(st.text(min_size=1), unique=True, max_size=200))
def test_files_are_split_into_two_disjoint_sets(names):
    train, validation = split_names(names, "train"), split_names(names, "validation")
    assert sorted(train + validation) == list(range(len(names))) == split_names(names, "all")
    assert len(validation) == -(-len(names) // 20)


@given(st.integers(0, 500))
def test_documents_are_split_into_two_disjoint_sets(n):
    numbers = np.arange(n)
    train, validation = in_split(numbers, "train"), in_split(numbers, "validation")
    assert (train ^ validation).all()
    assert in_split(numbers, "all").all()
    assert validation.sum() == -(-n // 20)


# --- stdlib


def test_stdlib_is_megabytes_of_utf8_split_by_file():
    source = {split: open_source("stdlib", split=split) for split in ("train", "validation", "all")}
    train, validation = set(read(source["train"])), set(read(source["validation"]))
    assert sum(map(len, train)) > 5_000_000
    assert 100_000 < sum(map(len, validation)) < 0.15 * sum(map(len, train))
    assert not train & validation
    assert train | validation == set(read(source["all"]))


def test_stdlib_has_neither_packages_nor_tests_nor_settings_of_the_build():
    names = [file.relative_to(stdlib_root()).as_posix() for file in stdlib_files(stdlib_root())]
    assert names == sorted(names)
    assert {"argparse.py", "asyncio/tasks.py"} <= set(names)
    assert not [n for n in names if "site-packages" in n or "/test" in n or "_sysconfigdata" in n]


# --- text files


@example(["a"] * 10 + ["\nxx日本語x" * 9, " ", "a"])
@given(
    st.lists(
        st.sampled_from(
            ["a", "é", " ", "\n", "\r\n", "line of text\n", "\nxx日本語x" * 9, "日xxx" * 30, "a word " * 20]
        ),
        min_size=1,
        max_size=60,
    )
)
def test_concatenated_fragments_of_a_file_are_the_file(tmp_path_factory, lines):
    text = "".join(lines)
    file = tmp_path_factory.mktemp("fragments") / "a.txt"
    file.write_bytes(text.encode())
    fragments = TextFiles(file.parent, [file], "all", fragment_bytes=32)
    texts = [fragments.document(i) for i in range(len(fragments))]
    assert "".join(texts) == text
    assert all(len(fragment.encode()) <= 2 * 32 for fragment in texts)
    if max(map(len, text.encode().split(b"\n"))) < 32:  # no line is longer than a fragment
        within = 0  # a last line without an end may be split at a space
        for fragment in filter(None, texts):
            within += len(fragment)
            assert fragment.endswith("\n") or within > len(text.rpartition("\n")[0])


def test_few_files_are_split_by_fragment_and_many_by_file(corpus):
    line = "a line of sixteen\n"
    (corpus / "one.txt").write_text(line * (3 * FRAGMENT_BYTES // len(line)))
    held_out = read(open_source("local", str(corpus), split="validation"))
    assert len(held_out) == 1
    assert len(read(open_source("local", str(corpus), split="train"))) == 2
    for i in range(40):
        (corpus / f"{i}.txt").write_text(TEXTS[i])
    (corpus / "one.txt").unlink()
    held_out = read(open_source("local", str(corpus), split="validation"))
    assert len(held_out) == 2
    assert set(held_out) | set(read(open_source("local", str(corpus)))) == set(TEXTS[:40])


def test_a_file_that_is_not_utf8_is_named(corpus):
    """The error counts bytes from the start of the file, not of a fragment."""
    line = "ü" * 50 + "\n"
    for text, byte in (
        (b"abc\nna\xefve\n", 6),
        (line.encode() * 3000 + b"caf\xc3", 303_003),
        (b"." * 70_000 + b"\xff", 70_000),
    ):
        (corpus / "latin.txt").write_bytes(text)
        with pytest.raises(DataError, match=rf"latin\.txt: byte {byte} is not UTF-8"):
            read(open_source("local", str(corpus), split="all"))


# --- which files


def test_a_path_is_a_file_a_folder_or_a_glob(corpus):
    (corpus / "deep").mkdir()
    for name in ("a.jsonl", "deep/b.jsonl", ".hidden.txt"):
        write_texts(corpus / name, ["x"])
    (corpus / "empty.txt").touch()
    for path, names in {
        corpus: ["a.jsonl", "deep/b.jsonl"],
        corpus / "a.jsonl": ["a.jsonl"],
        corpus / "*.jsonl": ["a.jsonl"],
        corpus / "**" / "*.jsonl": ["a.jsonl", "deep/b.jsonl"],
    }.items():
        root, files, file_format = find_files(str(path))
        assert file_format == "json"
        assert [file.relative_to(root).as_posix() for file in files] == names


def test_a_format_selects_files_and_overrides_their_extension(corpus):
    write_texts(corpus / "a.jsonl", ["x"])
    (corpus / "README.md").write_text("about")
    (corpus / "b.data").write_text("text")
    with pytest.raises(DataError, match=r"holds 1 text and 1 json files"):
        find_files(str(corpus))
    assert [file.name for file in find_files(str(corpus), "json")[1]] == ["a.jsonl"]
    assert find_files(str(corpus / "b.data"), "text")[2] == "text"
    with pytest.raises(DataError, match=r"holds \.data; the supported extensions"):
        find_files(str(corpus / "b.data"))


# --- rows


def test_rows_of_jsonl_and_parquet_are_the_same_documents(corpus):
    write_rows(corpus / "rows.jsonl", [{"body": text} for text in TEXTS])
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS, "n": range(45)}), corpus / "rows.parquet")
    for split, expected in {
        "validation": [TEXTS[0], TEXTS[20], TEXTS[40]],
        "train": [text for i, text in enumerate(TEXTS) if i % 20],
        "all": TEXTS,
    }.items():
        for name in ("rows.jsonl", "rows.parquet"):
            source = open_source("local", str(corpus / name), split=split, text_column="body")
            assert sorted(read(source)) == sorted(expected)


def jsonl(*rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(**columns) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


A, INT = {"text": "a"}, "holds a value of type int where there should be texts"
LATIN = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"ok", b"na\xefve"]).buffers())
NO_TEXT = {  # name and content of a bad file, which is read after a good file; the message that follows the name
    "numbers.jsonl": (jsonl({"text": 1}, {"text": 2}), rf", (line|row) 1 {INT}"),
    "booleans.jsonl": (jsonl({"text": True}), ", (line|row) 1 holds a value of type bool"),
    "a number.jsonl": (jsonl(A, A, {"text": 1}, A), rf", (line|row) 3 {INT}"),
    "nested.jsonl": (jsonl(A, {"text": ["a"]}, A), ", (line|row) 2 holds a value of type list"),
    "all nested.jsonl": (jsonl({"text": {"a": 1}}), ", (line|row) 1 holds a value of type dict"),
    "null.jsonl": (jsonl(A, {"text": None}), ", (line|row) 2 holds no value"),
    "no such key.jsonl": (jsonl(A, {"body": "a"}), ", line 2 has the columns 'body'|, row 2 holds no value"),
    "other column.jsonl": (jsonl({"body": "b"}), "(, line 1)? has the columns 'body'; name the one with the text"),
    "latin.jsonl": (jsonl(A) + b'{"text": "na\xefve"}', ", line 2 can't be read as json .*'utf-8' codec"),
    "surrogate.jsonl": (jsonl(A) + b'{"text": "\\ud800"}', ", line 2 holds an unpaired surrogate"),
    "cut.jsonl": (jsonl(A, A)[:-5], ", line 2 can't be read as json"),
    "array.json": (json.dumps(["a", "b", 3]).encode(), rf", row 3 ({INT}|holds a value of type int)"),
    "numbers.parquet": (parquet(text=[1, 2]), f", row 1 {INT}"),
    "null.parquet": (parquet(text=["a", None]), ", row 2 holds no value"),
    "nested.parquet": (parquet(text=[{"a": 1}]), ", row 1 holds a value of type dict"),
    "binary.parquet": (parquet(text=[b"a"]), ", row 1 holds a value of type bytes"),
    "other column.parquet": (parquet(body=["a"]), " has the columns 'body'; name the one with the text"),
    "latin.parquet": (parquet(text=LATIN), ", row 2 can't be read .*'utf-8' codec"),
    "cut.parquet": (parquet(text=["a"])[:-5], r" can't be read (as parquet )?\(ArrowInvalid: .*Parquet magic bytes"),
    "numbers.csv": (b"text\n1\n", f", row 1 {INT}"),
    "numbers.jsonl.gz": (gzip.compress(jsonl(A, {"text": 1})), f", row 2 {INT}"),
    "cut.jsonl.gz": (gzip.compress(jsonl(*TEXTS))[:-20], r" can't be read \(EOFError: Compressed file ended"),
}  # fmt: skip
GOOD = {
    "jsonl": jsonl(A, A), "json": b'["a"]', "parquet": parquet(text=["a", "b"]), "csv": b"text\na\n",
    "gz": gzip.compress(jsonl(A)),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_row_without_text_is_refused_with_its_file(corpus, name, capfd):
    content, message = NO_TEXT[name]
    (corpus / f"train-0.{name.rpartition('.')[2]}").write_bytes(GOOD[name.rpartition(".")[2]])
    (corpus / f"train-1 {name}").write_bytes(content)
    opened = [lambda: open_source(str(corpus))]
    if name.endswith(("jsonl", "json", "parquet")):
        opened.append(lambda: open_source("local", str(corpus), split="all"))
    for source in opened:
        error = refusal(lambda source=source: read(source()), kind=DataError)
        assert re.search(re.escape(str(corpus / f"train-1 {name}")) + f"({message})", error)
    assert capfd.readouterr().err == ""


def test_other_columns_and_empty_files_are_ignored(corpus):
    rows = [A, {"text": "b", "n": 1}, {"text": "c", "n": "1"}, {"n": {"n": [1]}, "text": "d"}]
    for name, texts in {"rows": jsonl(*rows), "empty": b"", "other": jsonl({"x": 0, "text": "e"})}.items():
        (corpus / f"train-{name}.jsonl").write_bytes(texts)
    assert sorted(read(open_source(str(corpus)))) == sorted(
        read(open_source("json", str(corpus), split="all"))
    )
    assert "".join(sorted(read(open_source(str(corpus))))) == "abcde"
    folder = corpus / "parquet"
    folder.mkdir()
    tables = [{"text": ["a"], "n": [1]}, {"n": ["x"], "text": pyarrow.array(["b"]).dictionary_encode()}]
    for name, table in enumerate(tables):
        (folder / f"{name}.parquet").write_bytes(parquet(**table))
    assert sorted(read(open_source(str(folder)))) == ["a", "b"]
    (folder / "2.parquet").write_bytes(parquet(text=pyarrow.array([], pyarrow.string())))
    assert sorted(read(open_source("local", str(folder), split="all"))) == ["a", "b"]


def test_a_folder_with_a_script_is_refused_in_one_line(corpus):
    write_texts(corpus / "train-0.jsonl", TEXTS)
    (corpus / f"{corpus.name}.py").write_text("raise SystemExit\n")
    with pytest.raises(DataError, match=r"^[^\n]*can't be opened \(RuntimeError: Dataset scripts"):
        open_source(str(corpus))


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.parquet", "stream"])
def test_fragments_of_a_long_row_stay_in_one_split(corpus, kind):
    texts = [f"{i} " + f"word{i} 日本語 " * 20_000 for i in range(3)] + ["", "short", "x" * 200_000]
    if kind == "stream":
        write_texts(corpus / "train.jsonl", texts)
        stream = open_source(str(corpus))
        documents = list(stream.documents(0, 0, 1, None))
        assert "".join(text for _, text in documents) == "".join(texts)
        for i, (position, _) in enumerate(documents):
            position = json.loads(json.dumps(position))
            # The next position is the same, so everything after it is the same, too.
            assert list(islice(stream.documents(0, 0, 1, position), 2)) == documents[i : i + 2]
        fragments = [text for _, text in documents]
    else:
        file = corpus / kind
        if kind == "rows.jsonl":
            write_texts(file, texts)
        else:
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=2)
        by_split = {
            split: sorted(read(open_source("local", str(file), split=split)))
            for split in ("train", "validation")
        }
        assert sum(map(len, by_split["validation"])) == len(texts[0])
        assert all("word0" in text for text in by_split["validation"])
        corpus_of = open_source("local", str(file), split="all")._corpus
        fragments = [corpus_of.document(i) for i in range(len(corpus_of))]
        assert "".join(fragments) == "".join(texts)
        assert sorted(by_split["train"] + by_split["validation"]) == sorted(fragments)
    assert max(len(fragment.encode()) for fragment in fragments) <= 2 * FRAGMENT_BYTES
    assert len(fragments) > 20
    assert all(fragment.endswith(" ") for fragment in fragments if "word" in fragment)


# --- order and readers


@pytest.fixture(params=["text", "rows", "stream", "uneven stream"])
def source(request, corpus):
    """Return a source of 45 documents: text files, rows, or a stream of 6 files or of 5, which is fewer than 6 readers."""
    if request.param == "text":
        for i, text in enumerate(TEXTS):
            (corpus / f"{i}.txt").write_text(text)
        return open_source("text", str(corpus), split="all")
    if request.param == "rows":
        return open_source("json", write_texts(corpus / "a.jsonl", TEXTS), split="all")
    files = 6 if request.param == "stream" else 5
    for i in range(files):
        write_texts(corpus / f"train-{i}.jsonl", TEXTS[i::files])
    return open_source(str(corpus))


@pytest.mark.parametrize("readers", [1, 3, 6])
def test_readers_of_an_epoch_are_disjoint_and_complete(source, readers):
    for epoch in (0, 1):
        by_reader = [read(source, epoch=epoch, reader=reader, readers=readers) for reader in range(readers)]
        assert sorted(chain.from_iterable(by_reader)) == sorted(TEXTS)
        assert all(by_reader)


def test_epochs_have_different_orders_which_are_repeatable(source):
    first, second = read(source), read(source, epoch=1)
    assert first != second
    assert read(source) == first
    assert read(source, epoch=1) == second


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_position_leads_back_to_its_document(source, epoch):
    documents = list(source.documents(epoch, 1, 3, None))
    for position, text in documents:
        position = json.loads(json.dumps(position))  # as in a checkpoint
        assert next(source.documents(epoch, 1, 3, position)) == (position, text)
    position, _ = documents[len(documents) // 2]
    assert list(source.documents(epoch, 1, 3, position)) == documents[len(documents) // 2 :]


def test_another_seed_is_another_order(corpus):
    file = write_texts(corpus / "a.jsonl", TEXTS)
    assert read(open_source("json", file, seed=0)) != read(open_source("json", file, seed=1))
