"""`titanplans data`: sequences as the model gets them, and the table of sources."""

import json

import pytest

from titanplans.cli.main import main

CHAT = "configs/chat_debug.toml"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("titanplans.cli.data._SECONDS", 0.0)


def test_conversations_mark_tokens_outside_of_the_loss(capsys):
    assert main(["data", CHAT, "--sequences", "2"]) == 0
    message = capsys.readouterr().out
    assert message.count("\nsequence 2: configs/chat_debug.jsonl, ") == 1
    assert "sequence 3" not in message
    assert "   1 | [[<|bos|>\\nuser: What is " in message
    assert "\\nassistant:]] " in message
    assert "     | answers end in '<|eos|>'" in message
    assert "conversations are used (dataset_split = 'train')" in message
    assert "stop token" not in message
    assert "documents apart; padding " in message
    assert "tokens/s in this process" in message


def test_answers_without_an_end_are_reported(capsys, tmp_path):
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endfor %}"
    )
    (tmp_path / "marked.jinja").write_text(template)
    arguments = ["--training.chat.chat_template", f"{tmp_path}/marked.jinja", "--sequences", "1"]
    assert main(["data", CHAT, *arguments]) == 0
    message = capsys.readouterr().out
    assert "     | answers end in " in message
    assert "no answer ends in a stop token ('<|eos|>'" in message


@pytest.fixture
def mixture(tmp_path):
    for name, words in (("a", "one two"), ("b", "three four five")):
        rows = [{"text": " ".join(words.split() * (1 + i % 9))} for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.toml").write_text(f"""
[training]
seq_len = 32
[data]
packing = "best_fit"
long_documents = "drop"
[[data.sources]]
name = "a"
dataset_path = "{tmp_path}/a.jsonl"
weight = 3.0
[[data.sources]]
name = "b"
dataset_path = "{tmp_path}/b.jsonl"
""")
    return tmp_path


def test_a_mixture_shows_documents_sources_and_padding(capsys, mixture):
    assert main(["data", f"{mixture}/job.toml", "--sequences", "20", "--data.documents", "joined"]) == 0
    *sequences, table = capsys.readouterr().out.split("\n\n")
    assert len(sequences) == 20
    assert {sequence.split()[2] for sequence in sequences} == {"a,", "b,"}
    assert any("of padding" in sequence for sequence in sequences)
    assert all("one" not in sequence for sequence in sequences if sequence.split()[2] == "b,")
    lines = [line.split() for line in table.splitlines()]
    assert [line[:2] for line in lines[2:4]] == [["a", "75.0%"], ["b", "25.0%"]]
    assert "documents joined; padding" in table
    assert "longer than a sequence" in table


def test_the_table_is_of_one_pass_or_of_a_sample(capsys, mixture, monkeypatch):
    """The command once read 80 short conversations again and again for 2 seconds, and reported half a million tokens."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (mixture / "chats.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 80)
    arguments = ["--training.dataset", "local", "--training.dataset_path", f"{mixture}/chats.jsonl"]
    arguments += ["--training.dataset_split", "all", "--sequences", "1", "--validation.no-enable"]
    monkeypatch.setattr("titanplans.cli.data._SECONDS", 2.0)
    assert main(["data", CHAT, *arguments]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert table[:2] == [
        "80 of 80 conversations are used (dataset_split = 'all')",
        f"every source was read to its end, {table[1].split()[-2]} sequences:",
    ]
    assert table[3].endswith("1.00 epochs, 80 documents of 80")
    tokens = int(table[3].split()[2].replace(",", ""))
    assert tokens % 80 == 0
    assert tokens < 80 * 20
    monkeypatch.setattr("titanplans.cli.data._SECONDS", 0.0)
    assert main(["data", "configs/gla_debug.toml", "--sequences", "1"]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert table[0].startswith("a sample, ")
    assert " 0.0" in table[2]


def test_each_document_is_one_line(capsys, mixture):
    assert main(["data", f"{mixture}/job.toml", "--sequences", "3"]) == 0
    for sequence in capsys.readouterr().out.split("\n\n")[:3]:
        title, *documents = sequence.splitlines()
        assert f", {len(documents)} document" in title
        assert all(" | [[<|bos|>]]" in line for line in documents)
        assert all(line.endswith("<|eos|>") for line in documents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequences", "0"], "--sequences 0: expected an integer, at least 1"),
        (["--rows", "3"], "--rows 3: this option is now called --sequences"),
        (["--data.sources", "[{weight = -1.0}]"], "data.sources.weight = -1.0"),
        (
            ["--data.sources", '[{dataset_path = "nowhere"}]'],
            "data.sources, nowhere: dataset_path = 'nowhere'",
        ),
        (
            ["--data.documents", "apart", "--model.name", "mom"],
            "data.documents = \"apart\": 'mom' is not known",
        ),
    ],
)
def test_refusals_are_one_line(capsys, mixture, arguments, message):
    assert main(["data", f"{mixture}/job.toml", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_copies_of_corpora_are_reported_and_removed(capsys, mixture, monkeypatch, tmp_path_factory):
    import datasets

    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    (cache / "other").touch()
    assert main(["data", f"{mixture}/job.toml", "--sequences", "1", "--training.epochs", "1"]) == 0
    assert "kB, which titanplans data --clean removes" in capsys.readouterr().out
    assert list(cache.rglob("*.arrow"))
    assert main(["data", "--clean"]) == 0
    assert f"removed {cache}/titanplans: " in capsys.readouterr().out
    assert [file.name for file in cache.iterdir()] == ["other"]
