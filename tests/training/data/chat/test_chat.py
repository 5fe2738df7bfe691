"""Conversations: which tokens are in the loss, and errors of rows and templates."""

import itertools
import json
import shutil
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from tests.support import data_sources
from tests.support.conversations import MARKED, PLAIN, TALK, decoded, form, message, numbered, tokens_of
from tests.support.data_sources import check_dataset, open_source
from tests.support.refusals import refusal
from titanplans.config.sections.data import Chat
from titanplans.errors import DataError
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.chat.messages import read_conversation
from titanplans.training.data.loader import TextDataLoader
from titanplans.training.data.vocabulary import check_tokenizer, default_tokenizer_path

# --- tokens in the loss


@pytest.mark.parametrize(
    ("row", "options", "counts"),
    [
        (TALK, {}, "2, naïve 日本語 🙂<|eos|>3<|eos|>"),
        (TALK, {"train_on": "last"}, "3<|eos|>"),
        (TALK[:-1], {"train_on": "last"}, "2, naïve 日本語 🙂<|eos|>"),
        ({"prompt": "Name a prime.", "completion": "5"}, {}, "5<|eos|>"),
        ({"prompt": TALK[:4], "completion": TALK[4:]}, {}, "3<|eos|>"),
        ({"messages": json.dumps(TALK)}, {}, "2, naïve 日本語 🙂<|eos|>3<|eos|>"),
        ([message("user", [{"type": "text", "text": "a"}]), message("assistant", "b")], {}, "b<|eos|>"),
    ],
)
@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "unmarked"])
def test_only_tokens_of_the_assistant_are_in_the_loss(chat, template, row, options, counts):
    row = row if isinstance(row, dict) else {"messages": row}
    tokens = tokens_of(row, chat(template, **options))
    # The end of a turn belongs to the turn unless the template says otherwise.
    ending = "\n" if template is PLAIN else ""
    assert decoded(tokens.ids[tokens.counted]) == counts.replace("<|eos|>", "<|eos|>" + ending)
    all_counted = tokens_of(row, chat(template, train_on="all"))
    assert all_counted.counted.all()
    assert all_counted.ids.tolist() == tokens.ids.tolist()
    assert decoded(all_counted.ids).startswith("<|bos|>[")


def test_a_token_that_begins_in_the_prompt_is_counted_as_by_transformers(chat):
    talk = [message("user", "a"), message("assistant", "  3")]
    for template, ending in ((MARKED, ""), (PLAIN, "\n")):
        for train_on in ("assistant", "last"):
            tokens = tokens_of({"messages": talk}, chat(template, train_on=train_on))
            assert decoded(tokens.ids[tokens.counted]) == "\n  3<|eos|>" + ending


def test_spaces_without_offsets_are_counted_like_others(chat, tmp_path):
    """The offsets of Llama 3's tokens leave out spaces, which makes transformers' masks wrong."""
    values = json.loads((Path(default_tokenizer_path()) / "tokenizer.json").read_text())
    values["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    shutil.copy(Path(default_tokenizer_path()) / "tokenizer_config.json", tmp_path)
    talk = [
        message("user", "a"),
        message("assistant", "\n\n b  c \n"),
        message("user", "d"),
        message("assistant", " e"),
    ]
    for template in (MARKED.replace("eos_token", "'.'"), PLAIN.replace("eos_token", "'.'")):
        options = chat(template)
        there = ChatFormat(options, str(tmp_path), 512)
        tokens = there.tokens(read_conversation({"messages": talk}, options, ""), "")
        text = decoded(tokens.ids[tokens.counted])
        assert "".join(text.split()) == "bc.e."
        assert tokens.ids.tolist() == tokens_of({"messages": talk}, options).ids.tolist()


def test_tokens_and_mask_are_those_of_transformers(chat):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_tokenizer_path())
    for talk in (TALK, TALK[1:3], TALK[:4], TALK * 3, [message("assistant", "only 🙂"), *TALK[1:]]):
        theirs = tokenizer.apply_chat_template(
            talk, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        ours = tokens_of({"messages": talk}, chat(MARKED))
        assert ours.ids.tolist() == theirs["input_ids"]
        assert ours.counted.astype(int).tolist() == theirs["assistant_masks"]
        text = tokenizer.apply_chat_template(talk, chat_template=PLAIN, tokenize=False)
        assert decoded(ours.ids) == text


def test_the_template_of_the_tokenizer_is_read_from_both_files(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(default_tokenizer_path()) / name, tmp_path / name)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    expected = None
    for where in ("tokenizer_config.json", "chat_template.jinja"):
        content = json.dumps(config | {"chat_template": MARKED}) if "json" in where else MARKED
        (tmp_path / where).write_text(content)
        options = Chat(enable=True)
        chat_format = ChatFormat(options, str(tmp_path), 512)
        got = chat_format.tokens(read_conversation({"messages": TALK}, options, ""), "").to_bytes()
        assert expected is None or got == expected
        expected = got
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))


# --- messages that are taken out of the loss


@pytest.mark.parametrize("marks", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}])
@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("at", "train_on", "counts"),
    [
        (2, "assistant", "3."),
        (4, "assistant", "2, naïve 日本語 🙂."),
        (4, "last", ""),
        (2, "last", "3."),
        (3, "assistant", "2, naïve 日本語 🙂.3."),
    ],
)
def test_a_message_may_be_taken_out_of_the_loss(chat, template, marks, at, train_on, counts):
    talk = [m | marks if n == at else m | {"weight": 1} for n, m in enumerate(TALK)]
    tokens = tokens_of({"messages": talk}, chat(template, train_on=train_on))
    assert "weight" not in decoded(tokens.ids)
    ending = "<|eos|>" if template is MARKED else "<|eos|>\n"
    assert decoded(tokens.ids[tokens.counted]) == counts.replace(".", ending)


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "unmarked"])
def test_a_message_is_taken_out_with_train_on_all(chat, template):
    talk = [m | ({"loss": False} if n in (0, 3) else {}) for n, m in enumerate(TALK)]
    tokens = tokens_of({"messages": talk}, chat(template, train_on="all"))
    assert decoded(tokens.ids[~tokens.counted]) == "<|bos|>[system]\nBe brief.\n[user]\n Another? \n"


def test_marks_are_used_if_earlier_answers_are_rewritten(chat):
    """Qwen3's template leaves out the thoughts of earlier turns."""
    template = MARKED.replace("m.content + eos", "(m.content if loop.last else m.content[1:]) + eos")
    talk = [*TALK[:4], message("assistant", "34")]
    for train_on, row, counts in (
        ("last", talk, "34<|eos|>"),
        ("assistant", [*talk[:2], talk[2] | {"train": False}, *talk[3:]], "34<|eos|>"),
        ("assistant", [*talk[:4], talk[4] | {"train": False}], ", naïve 日本語 🙂<|eos|>"),
    ):
        tokens = tokens_of({"messages": row}, chat(template, train_on=train_on))
        assert decoded(tokens.ids[tokens.counted]) == counts


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [message("user", "a") | {"loss": "no"}]}, 'message 1 has loss = "no": a message is in the loss'),
        ({"messages": [message("user", "a"), message("assistant", "b") | {"weight": 0.5}]}, "message 2 has weight = 0.5: "),
        ({"messages": [message("user", "a") | {"train": True}]}, "but what 'user' says is not in the loss; leave train out"),
        ({"prompt": [message("user", "a"), message("assistant", "b") | {"train": True}], "completion": "c"},
         "message 2 has train = true, but a prompt is not in the loss"),
        ({"messages": TALK, "weight": 0.5}, "here has weight = 0.5, but all rows of a source have the same weight"),
        ({"messages": TALK, "weight": 0}, "here has weight = 0, but all rows"),
    ],
)  # fmt: skip
def test_unsupported_weights_are_refused(chat, row, reason):
    assert reason in refusal(tokens_of, row, chat(), kind=DataError)
    assert tokens_of({"messages": TALK, "weight": 1}, chat()).has_counted_tokens


def test_a_weight_in_parquet_is_read(chat, tmp_path):
    for weight in (1.0, 0.5):
        pyarrow.parquet.write_table(
            pyarrow.table({"messages": [TALK], "weight": [weight]}), tmp_path / "a.parquet"
        )
        path = str(tmp_path / "a.parquet")
        if weight == 1.0:
            assert open_source("local", path, split="all", chat=form(chat())).size == 1
        else:
            assert f"{path}, row 1 has weight = 0.5" in refusal(
                open_source, "local", path, split="all", chat=form(chat()), kind=DataError
            )


# --- the end of a turn


def test_answers_without_an_end_are_logged_in_one_line(chat, rows_file):
    path = rows_file(*numbered(3))

    def notes(template, **options):
        return check_dataset("local", path, split="all", chat=form(chat(template, **options)))

    for template in (MARKED, PLAIN):
        assert notes(template) == ["3 of 3 conversations are used (dataset_split = 'all')"]
    outside = MARKED.replace(" + eos_token }}{% endgeneration %}", " }}{% endgeneration %}{{ eos_token }}")
    _, line = notes(outside)
    assert (
        "no answer ends in a stop token ('<|eos|>', according to eos_token in tokenizer_config.json" in line
    )
    assert "put one inside its {% generation %} marks" in line
    assert len(notes(outside, train_on="all")) == 1
    _, line = notes(PLAIN.replace("+ eos_token", ""))
    assert "write one at the end of each answer in a chat_template" in line


GLM = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_the_next_role_ends_a_turn_if_it_is_a_stop_token(chat, tmp_path, rows_file):
    """As in GLM 4, whose generation_config.json has the tokens of roles as stop tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_tokenizer_path())
    roles = [f"<|{role}|>" for role in ("user", "assistant", "observation")]
    tokenizer.add_special_tokens({"additional_special_tokens": roles})
    tokenizer.save_pretrained(tmp_path / "glm")
    (tmp_path / "glm" / "chat_template.jinja").write_text(GLM)
    ids = tokenizer.convert_tokens_to_ids(roles)
    stops = {"eos_token_id": [tokenizer.eos_token_id, ids[0], ids[2]]}
    (tmp_path / "glm" / "generation_config.json").write_text(json.dumps(stops))
    options = Chat(enable=True)
    there = ChatFormat(options, str(tmp_path / "glm"), 512)
    talk = [
        message("user", "a"),
        message("assistant", "b"),
        message("observation", "c"),
        message("assistant", "d"),
    ]
    tokens = there.tokens(read_conversation({"messages": talk}, options, ""), "")
    assert tokenizer.decode(tokens.ids[tokens.counted]) == "b<|observation|>d"
    assert there.stops_in(tokens)
    single = there.tokens(read_conversation({"messages": talk[:2]}, options, ""), "")
    assert not there.stops_in(single)
    path = rows_file(talk[:2])
    assert "'<|user|>'" in check_dataset("local", path, split="all", chat=there)[1]
    assert len(check_dataset("local", rows_file(talk), split="all", chat=there)) == 1


# --- tool calls and thoughts of an assistant


def calling(arguments, **more):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


CALLS = PLAIN.replace(
    "{{ m.content + eos_token }}",
    "{{ m.content }}{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{{ eos_token }}",
)


def test_parts_of_an_answer_that_a_template_leaves_out_are_refused(chat):
    question = message("user", "a")
    for template in (PLAIN, MARKED):
        error = refusal(
            tokens_of, {"messages": [question, calling({"x": 1})]}, chat(template), kind=DataError
        )
        assert "leaves out the tool_calls of message 2; give a chat_template that writes it" in error
        talk = [
            question,
            message("assistant", "b") | {"reasoning_content": "since"},
            question,
            message("assistant", "c"),
        ]
        error = refusal(tokens_of, {"messages": talk}, chat(template), kind=DataError)
        assert "leaves out the reasoning_content of message 2" in error
    tokens = tokens_of({"messages": [question, calling({"x": 1})]}, chat(CALLS))
    assert decoded(tokens.ids[tokens.counted]) == '<f {"x": 1}><|eos|>\n'
    talk = [question, {"role": "assistant", "content": "", "id": "7"}]
    assert "message 2 of 'messages' is empty" in refusal(
        tokens_of, {"messages": talk}, chat(), kind=DataError
    )


def test_thoughts_of_earlier_turns_may_be_left_out(chat):
    template = MARKED.replace(
        "{{ m.content", "{{ (m.reasoning_content | default('') if loop.last else '') + m.content"
    )
    thinks = message("assistant", "b") | {"reasoning": "since "}
    talk = [message("user", "a"), thinks, message("user", "a"), thinks]
    tokens = tokens_of({"messages": talk}, chat(template))
    assert decoded(tokens.ids[tokens.counted]) == "b<|eos|>since b<|eos|>"


@pytest.mark.parametrize(
    ("template", "arguments", "written"),
    [
        (CALLS, '{"x": "é"}', '{"x": "é"}'),
        (CALLS, "{}", "{}"),
        (CALLS.replace("arguments | tojson", "arguments"), '{"x":  1}', '{"x":  1}'),
        (CALLS.replace("| tojson", "| items | first | first"), '{"x": 1}', "x"),
    ],
)
def test_arguments_given_as_text_are_not_quoted_twice(chat, template, arguments, written):
    talk = [message("user", "a"), calling(arguments)]
    tokens = tokens_of({"messages": talk}, chat(template))
    assert decoded(tokens.ids[tokens.counted]) == f"<f {written}><|eos|>\n"
    error = refusal(tokens_of, {"messages": [talk[0], calling("{")]}, chat(CALLS), kind=DataError)
    assert "here: the arguments of a tool call are not valid JSON" in error


def test_the_template_of_a_folder_may_have_marks(tmp_path):
    """torchtitan's tokenizer compiles the template too, in a Jinja environment that does not know the tag."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(default_tokenizer_path()) / name, tmp_path / name)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values | {"chat_template": MARKED}))
    assert check_tokenizer(str(tmp_path)) == 4096
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    assert check_tokenizer(str(tmp_path)) == 4096


def test_variables_and_tools_reach_the_template(chat):
    template = "{{ mood }}{{ tools | length }}" + PLAIN
    row = {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]}
    tokens = tokens_of(row, chat(template, chat_template_kwargs={"mood": "glad"}))
    assert decoded(tokens.ids).startswith("glad1<|bos|>")


# --- batches


def loader(path, options, *, seq_len=64, dp_world_size=1, dp_rank=0, **config):
    config_of_loader = data_sources.config(
        dataset="local", dataset_path=path, split="all", chat=options, **config
    )
    at = {"dp_world_size": dp_world_size, "dp_rank": dp_rank, "seq_len": seq_len, "local_batch_size": 2}
    return TextDataLoader(config_of_loader, tokenizer=data_sources.tokenizer(), **at)


@pytest.mark.parametrize("packing", [True, False])
def test_labels_are_the_next_tokens_of_the_assistant_and_conversations_are_not_split(
    chat, rows_file, packing
):
    answers = []
    for inputs, labels in loader(rows_file(*numbered(9)), chat(packing=packing), infinite=False):
        for x, positions, y in zip(inputs["input"], inputs["positions"], labels, strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(x)]
            counts = 0
            for begin, end in itertools.pairwise(starts):
                if not (counted := y[begin:end] != -100).any():
                    assert end == len(x), "only padding"
                    continue
                counts += 1
                text = decoded(x[begin:end]).split("<|bos|>", 1)
                assert text[0] == ""
                at = counted.nonzero().flatten()
                assert torch.equal(at, torch.arange(at[0], at[-1] + 1))
                assert torch.equal(x[begin:end][at[1:]], y[begin:end][at[:-1]])
                answers.append(decoded(y[begin:end][at]))
            assert counts < 2 or packing
    assert sorted(answers) == sorted(f"answer {i}<|eos|>" for i in range(9))


def test_ranks_without_a_token_in_the_loss_are_only_at_the_end_of_a_pass(chat, rows_file):
    path = rows_file(*numbered(5))
    by_rank = [
        list(loader(path, chat(packing=False), infinite=False, dp_world_size=3, dp_rank=rank))
        for rank in range(3)
    ]
    for step in zip(*by_rank, strict=True):  # every step has tokens in the loss, so their mean is not 0 / 0
        assert any((labels != -100).any() for _, labels in step)
    endless = [loader(path, chat(), dp_world_size=3, dp_rank=rank) for rank in range(3)]
    for batches in endless:
        assert all((labels != -100).any(1).all() for _, labels in islice(batches, 20))


LONG = [message("user", "why? " * 30), message("assistant", "because " * 20)]


def test_conversations_that_are_too_long_are_dropped_or_truncated_and_counted(chat, rows_file, caplog):
    path = rows_file(*numbered(4), LONG, TALK[:2], [message("user", "x"), message("assistant", "y " * 90)])

    def read(**options):
        return open_source("local", path, split="all", chat=form(chat(**options), 64))

    dropped = read()
    assert dropped.summary == (
        "4 of 7 conversations are used (dataset_split = 'all'); left out because none of their "
        f"tokens count: 1 (the first: {path}, line 6); left out because they are too long: 2 (the first: {path}, line 5, "
        "127 tokens)"
    )
    right = read(truncation="right")  # of the too long LONG only the question remains
    assert len(right._corpus) == 5
    left = read(truncation="left")
    assert len(left._corpus) == 6
    longest = max((left._corpus.document(i) for i in range(6)), key=len)
    assert len(longest) == 65
    assert "truncated to seq_len = 64: 2 (the first" in left.summary
    with pytest.raises(DataError, match=r"line 5 has 127 tokens, .*seq_len \+ 1 = 65"):
        read(truncation="error")


def test_a_streamed_corpus_counts_what_it_drops(chat, rows_file, tmp_path, caplog):
    (tmp_path / "data").mkdir()
    path = rows_file(*numbered(3), LONG, TALK[:2])
    shutil.move(path, tmp_path / "data" / "train.jsonl")
    stream = open_source(str(tmp_path / "data"), chat=form(chat(), 64))
    with caplog.at_level("INFO", "titanplans"):
        assert len(list(stream.documents(0, 0, 1, None))) == 3
    lines = [record.message for record in caplog.records if "left out" in record.message]
    assert "left out or truncated 1 conversations; the newest: " in lines[0]
    assert lines[0].endswith("line 4, 127 tokens") or lines[0].endswith("row 4, 127 tokens")
    assert lines[1].endswith("row 5, none of its tokens count")


def test_keys_of_other_rows_are_not_added(chat, tmp_path):
    """Arrow adds the keys of all objects to each one, as None, and a template would write them.

    Before pyarrow 22 Arrow also sorts the keys.
    """
    template = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + PLAIN
    tools = [[{"a": {"x": 1}, "name": "f"}], [{"a": {"y": [1, None]}, "name": "g"}]]
    table = pyarrow.table({"messages": [TALK, TALK], "tools": tools})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    corpus = open_source("local", str(tmp_path / "a.parquet"), split="all", chat=form(chat(template)))._corpus
    for n, tool in enumerate(tools):
        assert decoded(corpus.document(n).ids).startswith(json.dumps(tool[0]))


def test_a_checkpoint_of_other_settings_is_refused(chat, rows_file):
    path = rows_file(*numbered(12))
    state = loader(path, chat()).state_dict()
    loader(path, chat(packing=False, truncation="left"), seq_len=48).load_state_dict(state)
    for options, key in (
        (chat(train_on="all"), "chat"),
        (chat(MARKED + " "), "chat"),
    ):
        with pytest.raises(DataError, match=rf"^{key} = .*: the checkpoint's data loader had"):
            loader(path, options).load_state_dict(state)
    extra = rows_file(LONG, *numbered(11))
    state, shorter = loader(extra, chat(), seq_len=256).state_dict(), loader(extra, chat())
    with pytest.raises(DataError, match=r"^conversations = 11: .* had 12"):
        shorter.load_state_dict(state)


# --- refusals


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a"}, "messages_column = 'messages': FILE, line 2 has the columns 'text'"),
        ({"messages": []}, "FILE, line 2 holds an empty conversation"),
        ({"messages": None}, "FILE, line 2: 'messages' holds no value"),
        ({"messages": "hello"}, "FILE, line 2: 'messages' is a text that is not JSON"),
        ({"messages": {"role": "user"}}, "'messages' holds a value of type dict"),
        ({"messages": ["hello"]}, "message 1 of 'messages' holds a value of type str"),
        ({"messages": [{"from": "human", "value": "a"}]}, "message 1 of 'messages' has 'from', 'value', but"),
        ({"messages": [{"role": "user", "content": None}]}, "has 'role', but needs a role and a content"),
        ({"messages": [{"role": "user", "content": 3}]}, "holds a value of type int where there should be a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "FILE, line 2, message 1 of 'messages' has content of type 'image'",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "holds an unpaired surrogate"),
        ({"messages": [message("judge", "a")]}, "can't write the conversation (TemplateError: no role judge)"),
        ({"prompt": "a", "completion": 3}, "'completion' holds a value of type int"),
        ({"messages": TALK, "tools": "{"}, "'tools' is a text that is not JSON"),
        ({"messages": TALK, "tools": [1]}, "'tools' holds a value of type int where there should be a list of schemas"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_conversation_is_refused_with_its_line(chat, rows_file, row, reason):
    path = rows_file(TALK, row)
    error = refusal(open_source, "local", path, split="all", chat=form(chat()), kind=DataError)
    assert reason.replace("FILE", path) in error
    assert f"{path}, line 2" in error


def test_a_row_of_parquet_is_named_too(chat, tmp_path):
    table = pyarrow.table({"messages": [TALK, []]}, schema=None)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2 holds an empty"):
        open_source("local", str(tmp_path / "a.parquet"), split="all", chat=form(chat()))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "is not valid Jinja (TemplateSyntaxError: "),
        ("{{ messages[0].__class__.__mro__ }}", "can't write the conversation (SecurityError: access to"),
        ("{{ ''.join(messages) }}", "can't write the conversation (TypeError"),
        (PLAIN + "{{ strftime_now('%d') }}", "date (strftime_now)"),
        ("{{ unk_token }}" + PLAIN, "writes unk_token, which tokenizer_config.json"),
        ("<|im_start|>" + PLAIN, "writes '<|im_start|>', which is not a token"),
        (
            "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
            "leaves out what 'system' says in message 1",
        ),
        (
            "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}(it said){% endif %}"
            "{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}",
            "writes the first 2 messages differently",
        ),
    ],
)  # fmt: skip
def test_an_unusable_template_is_refused_in_one_sentence(chat, rows_file, template, reason):
    path = rows_file(TALK)
    assert reason in refusal(
        lambda: open_source("local", path, split="all", chat=form(chat(template))), kind=DataError
    )


def test_variables_that_a_template_only_tests_may_be_unset(chat):
    guarded = "{% if unk_token %}{{ unk_token }}{% endif %}{{ pad_token or '' }}{{ sep_token | default('') }}"
    assert decoded(tokens_of({"messages": TALK}, chat(guarded + PLAIN)).ids).startswith("<|bos|>")


def test_a_first_message_of_the_assistant_is_in_the_loss_only_if_marked(chat):
    talk = {"messages": TALK[2:]}
    assert tokens_of(talk, chat(MARKED)).counted.any()
    with pytest.raises(DataError, match=r"here: the assistant begins.*{% generation %}"):
        tokens_of(talk, chat(PLAIN))


def test_other_refusals(chat, rows_file, tmp_path):
    with pytest.raises(DataError, match=r"no chat template \(no chat_template.jinja"):
        form(Chat(enable=True))
    with pytest.raises(DataError, match=r"^chat_template = '/nowhere.jinja' can't be read"):
        form(Chat(enable=True, chat_template="/nowhere.jinja"))
    with pytest.raises(DataError, match=r"^chat_template_kwargs has 'tokenize'"):
        form(chat(chat_template_kwargs={"tokenize": True}))
    with pytest.raises(DataError, match=r"holds texts, .*chat.enable = true"):
        open_source("stdlib", chat=form(chat()))
    with pytest.raises(DataError, match=r"holds no conversation .*within seq"):
        open_source("local", rows_file(TALK[:2]), split="all", chat=form(chat()))
