"""Conversations whose columns and keys have other names: ShareGPT's, Alpaca's, and any others."""

import typing
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.conversations import PLAIN, decoded, form, message, numbered, tokens_of
from tests.support.data_sources import open_source
from tests.support.refusals import refusal
from titanplans.config import load_job
from titanplans.config.sections.data import Chat
from titanplans.errors import DataError
from titanplans.training.data.chat.messages import FORMATS, read_conversation


def shared(*turns):
    return {"id": "x_0", "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


TALK = shared(("system", "Be brief."), ("human", "A prime?"), ("gpt", "2"), ("tool", ""), ("gpt", "3"))
ASK = {"instruction": "Add them.", "input": "2 and 3", "output": "5"}
SHAREGPT, ALPACA = {"format": "sharegpt"}, {"format": "alpaca"}
OF_ORCA = {"prompt_column": "question", "completion_column": "response", "system_column": "system_prompt"}
ROWS = [
    (TALK, SHAREGPT, "system: Be brief.|user: A prime?|assistant: 2|tool: |assistant: 3"),
    (shared(("human", "a"), ("gpt", "b")) | {"system": "s"}, SHAREGPT, "system: s|user: a|assistant: b"),
    (shared(("user", "a"), ("observation", "t"), ("gpt", "b")), SHAREGPT, "user: a|tool: t|assistant: b"),
    (shared(("human", "a"), ("bard", "b")), SHAREGPT | {"roles": {"bard": "assistant"}}, "user: a|assistant: b"),
    (ASK, ALPACA, "user: Add them.\n\n2 and 3|assistant: 5"),
    (ASK | {"input": ""}, ALPACA, "user: Add them.|assistant: 5"),
    ({"instruction": "a", "output": "b", "system": None}, ALPACA, "user: a|assistant: b"),
    (ASK | {"system": "s"}, ALPACA, "system: s|user: Add them.\n\n2 and 3|assistant: 5"),
    ({"question": "a", "response": "b", "system_prompt": "s"}, OF_ORCA, "system: s|user: a|assistant: b"),
    (
        {"turns": [{"by": "q", "text": "a"}, {"by": "a", "text": "b"}]},
        {"messages_column": "turns", "role_key": "by", "content_key": "text", "roles": {"q": "user", "a": "assistant"}},
        "user: a|assistant: b",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "options", "expected"), ROWS)
def test_rows_become_messages(row, options, expected):
    conversation = read_conversation(row, Chat(enable=True, **options), "here")
    assert "|".join(f"{m['role']}: {m['content']}" for m in conversation.messages) == expected
    assert all(message.keys() == {"role", "content"} for message in conversation.messages)


def test_tool_calls_reach_the_template_in_either_format():
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    for row, options in (
        ({"messages": [message("user", "a"), {"role": "assistant", **call}, message("tool", "1")]}, {}),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", **call}, {"from": "tool", "value": "1"}]},
            SHAREGPT,
        ),
    ):  # fmt: skip
        conversation = read_conversation(row | {"tools": tools}, Chat(enable=True, **options), "here")
        assert conversation.tools == tools
        assert conversation.messages == [
            message("user", "a"),
            {"role": "assistant", **call},
            message("tool", "1"),
        ]


def test_tokens_of_the_assistant_are_in_the_loss(chat):
    for row, options, counts in ((TALK, SHAREGPT, "2<|eos|>\n3<|eos|>\n"), (ASK, ALPACA, "5<|eos|>\n")):
        tokens = tokens_of(row, chat(PLAIN, **options))
        assert decoded(tokens.ids[tokens.counted]) == counts


@pytest.mark.parametrize(
    ("table", "options"),
    [
        ([{"messages": talk, "id": n} for n, talk in enumerate(numbered(2))], {}),
        ([TALK | {"system": None}, TALK | {"system": "s"}], SHAREGPT),
        ([ASK, ASK | {"input": None}], ALPACA),
    ],
)
def test_parquet_gives_the_same_conversations_as_jsonl(chat, rows_file, tmp_path, table, options):
    """Only the needed columns are read."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    reader, paths = form(chat(PLAIN, **options)), (str(tmp_path / "a.parquet"), rows_file(*table))
    both = [open_source("local", path, split="all", chat=reader)._corpus for path in paths]
    of_parquet, of_jsonl = ([corpus.document(i).to_bytes() for i in range(2)] for corpus in both)
    assert of_parquet == of_jsonl
    assert of_parquet[0] != of_parquet[1]


REFUSED = [
    (shared(("human", "a"), ("bard", "b")), SHAREGPT,
     "FILE, line 1, message 2 of 'conversations' has from = 'bard', but"),
    (shared(("human", "a"), ("gpt", " \n")), SHAREGPT, "FILE, line 1, message 2 of 'conversations' is empty"),
    ({"conversations": [{"from": "human"}]}, SHAREGPT, "FILE, line 1, message 1 of 'conversations' has 'from', but needs"),
    ({"conversations": [message("user", "a")]}, SHAREGPT, "has 'role', 'content', but needs a from"),
    (shared(("human", "a")) | {"system": 3}, SHAREGPT, "FILE, line 1: 'system' holds a value of type int"),
    ({"text": "a"}, SHAREGPT, "messages_column = 'conversations': FILE, line 1 has the columns 'text'"),
    (TALK, {}, "messages_column = 'messages': FILE, line 1 has the columns 'conversations', 'id'"),
    (TALK, {}, 'or set format = "sharegpt"'),
    ({"messages": TALK["conversations"]}, {}, "has 'from', 'value', but needs a role"),
    ({"messages": TALK["conversations"]}, {}, 'set chat.format = "sharegpt"'),
    (ASK, {}, 'or set format = "alpaca"'),
    (ASK, {"prompt_column": "instruction", "completion_column": "output"}, "prompt_column = 'instruction': FILE, line 1 "
     "also has 'input'"),
    (ASK | {"output": ""}, ALPACA, "FILE, line 1: 'output' is empty"),
    (ASK | {"input": ["a"]}, ALPACA, "FILE, line 1: 'input' holds a value of type list"),
    (ASK | {"instruction": [message("user", "a"), message("user", "b")]}, ALPACA,
     "FILE, line 1: 'input' belongs to a prompt"),
    ({"instruction": "a"}, ALPACA, "completion_column = 'output': FILE, line 1 has the columns 'instruction'"),
    (ASK, {"prompt_column": "question"}, "prompt_column = 'question': FILE, line 1 has the columns"),
    ({"prompt": "a", "completion": "b"}, {"input_column": "more"},
     "input_column = 'more': FILE, line 1 has the columns 'completion', 'prompt'"),
    (TALK, SHAREGPT | {"input_column": "id"}, "input_column = 'id': FILE, line 1 holds messages"),
    (TALK, SHAREGPT | {"prompt_column": "id"}, "prompt_column = 'id': FILE, line 1 holds messages"),
    ({"messages": [message("user", "a"), message("assistant", "")]}, {}, "FILE, line 1, message 2 of 'messages' is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "options", "reason"), REFUSED)
def test_a_row_that_does_not_fit_is_refused_in_one_sentence(chat, rows_file, row, options, reason):
    path = rows_file(row)
    error = refusal(
        open_source, "local", path, split="all", chat=form(chat(PLAIN, **options)), kind=DataError
    )
    assert reason.replace("FILE", path) in error
    assert f"{path}, line 1" in error


def test_the_formats_are_those_of_the_option(tmp_path, monkeypatch):
    assert list(FORMATS) == list(typing.get_args(typing.get_type_hints(Chat)["format"]))
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('[training.chat]\nenable = true\nroles = {bard = "assistant"}\n')
    assert load_job(["job.toml"]).training.chat.roles == {"bard": "assistant"}
