"""Rows as conversations: how they are laid out, and whether each message is one that a chat template can write out.

A format is what `[training.chat]` leaves unset: names of columns and of a message's keys. Reading rows is the same for all.
What counts in the loss, and tokens, are in `chat.py`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from titanplans.config.sections.data import Chat
from titanplans.errors import DataError
from titanplans.text import show
from titanplans.training.data.reading import expect

_REMEDY = "repair the row or leave it out"
TRAINED = ("weight", "loss", "train")
"""Keys by which a message says whether it is trained on: 0 or false takes it out of the loss."""
SAID_ELSEWHERE = (("tool_calls",), ("function_call",), ("reasoning_content", "reasoning", "thinking"))
"""Keys, apart from its content, of what an assistant says; transformers gives templates one name of a group for another."""


class Columns(NamedTuple):
    """The names of a row's columns and keys, as in [training.chat]; None: rows have no such column."""

    messages_column: str | None = None
    role_key: str = "role"
    content_key: str = "content"
    roles: Mapping[str, str] = {}
    """What a row calls a role -> what the template calls it; empty: roles are the template's own."""
    prompt_column: str | None = None
    input_column: str | None = None
    completion_column: str | None = None
    system_column: str | None = None


_SPEAKERS = {
    **{"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"},
    **{"system": "system", "tool": "tool", "observation": "tool"},
}

FORMATS = {
    "messages": Columns("messages", prompt_column="prompt", completion_column="completion"),
    "sharegpt": Columns("conversations", "from", "value", _SPEAKERS, system_column="system"),
    "alpaca": Columns(
        prompt_column="instruction", input_column="input", completion_column="output", system_column="system"
    ),
}
"""By [training.chat] format."""


def laid_out(chat: Chat) -> Columns:
    """Return the names that a job gives, and its format's for the others."""
    given: dict[str, Any] = {
        name: value for name in Columns._fields if (value := getattr(chat, name)) is not None
    }
    names = FORMATS[chat.format]
    given["roles"] = {**names.roles, **given.get("roles", {})}
    return names._replace(**given)


def columns_of(there: Sequence[str], chat: Chat, where: str) -> Columns:
    """Return the fields to read of a row that has the columns `there`: messages, or a prompt and its completion.

    Raises:
        DataError: neither is there, or a column that is named is not; names `where`, the file or the row.
    """
    names = laid_out(chat)
    found = f"{where} has the columns {', '.join(map(repr, sorted(there))) or 'none'}"
    if names.messages_column in there:
        for option in ("prompt_column", "completion_column", "input_column"):
            if (given := getattr(chat, option)) is not None:
                raise DataError(
                    f"{option} = {given!r}: {where} holds messages, which are read instead; leave it out"
                )
        names = names._replace(prompt_column=None, completion_column=None, input_column=None)
    elif {names.prompt_column, names.completion_column} <= set(there):
        names = names._replace(messages_column=None)
    else:
        texts = ("prompt_column", "completion_column")
        named = any(getattr(chat, option) is not None for option in texts) and chat.messages_column is None
        missing = (option for option in texts if getattr(names, option) not in there)
        first = "messages_column" if names.messages_column and not named else next(missing)
        fits = [
            f', or set format = "{name}"'
            for name, other in FORMATS.items()
            if name != chat.format
            and (
                other.messages_column in there or {other.prompt_column, other.completion_column} <= set(there)
            )
        ]
        raise DataError(
            f"{first} = {getattr(names, first)!r}: {found}; name the one with the messages in chat.messages_column, or "
            f"those of prompts and their answers in prompt_column and completion_column{''.join(fits[:1])}"
        )
    for option in ("input_column", "system_column"):
        if getattr(names, option) not in there:
            if (given := getattr(chat, option)) is not None:
                raise DataError(f"{option} = {given!r}: {found}; name one of them, or leave it out")
            without: dict[str, Any] = {option: None}
            names = names._replace(**without)
    alpaca = FORMATS["alpaca"]
    if (
        names.prompt_column == alpaca.prompt_column
        and names.input_column is None
        and alpaca.input_column in there
    ):
        raise DataError(
            f"prompt_column = {names.prompt_column!r}: {where} also has {alpaca.input_column!r}, which would not be read; "
            'set chat.format = "alpaca", or input_column'
        )
    return names


class Conversation(NamedTuple):
    """A row's messages, as transformers' `apply_chat_template` takes them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    """The tools of the assistant, from the row's column "tools"."""
    prompt: int
    """Messages at the beginning in which nothing counts: those of a prompt."""
    excluded: frozenset[int] = frozenset()
    """Indices of messages that the row takes out of the loss."""


def conversation_of(row: Any, chat: Chat, where: str) -> Conversation:
    """Return the conversation of a row, which has a column of messages, or one of a prompt and one of its completion.

    Raises:
        DataError: it has no such column, a weight, no message, or a message without a role that is known or a content that
            is a text and says something; names `where`, the file and the row.
    """
    row = expect(row, dict, where, "an object", _REMEDY)
    names = columns_of(list(row), chat, where)
    if (weight := row.get("weight")) is not None and weight != 1:
        raise DataError(
            f"{where} has weight = {show(weight)}, and rows of a source weigh the same; leave the row out, or give sources "
            "of other weights ([[data.sources]] weight)"
        )
    if names.messages_column is not None:
        messages, before = _messages(row, names.messages_column, names, where), 0
    else:
        asked = _messages(row, names.prompt_column, names, where, "user")
        if names.input_column is not None and (more := _optional(row, names.input_column, where)):
            if len(asked) != 1:
                raise DataError(
                    f"{where}: {names.input_column!r} belongs to a prompt that is a text, and {names.prompt_column!r} holds "
                    f"messages; {_REMEDY}"
                )
            asked[0]["content"] += f"\n\n{more}"
        answered = _messages(row, names.completion_column, names, where, "assistant")
        messages, before = asked + answered, len(asked)
    if not messages:
        raise DataError(f"{where} holds an empty conversation; {_REMEDY}")
    if names.system_column is not None and (said := _optional(row, names.system_column, where)):
        messages, before = [{"role": "system", "content": said}, *messages], before + 1
    tools: Any = row.get("tools")
    if isinstance(tools, str):
        tools = _parsed(tools, "tools", where)
    for tool in expect(tools or [], list, f"{where}: 'tools'", "a list of schemas", _REMEDY):
        expect(tool, dict, f"{where}: 'tools'", "a list of schemas", _REMEDY)
    excluded = {
        n
        for n, message in enumerate(messages)
        if not _is_trained(message, chat.train_on, f"{where}, message {n + 1}", in_prompt=n < before)
    }
    return Conversation(messages, tools or None, before, frozenset(excluded))


def _is_trained(message: dict[str, Any], train_on: str, where: str, *, in_prompt: bool) -> bool:
    """Take the keys of TRAINED out of a message, which no template is given; return whether they leave it in the loss."""
    is_trained = True
    for key in TRAINED:
        value = message.pop(key, None)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(
                f"{where} has {key} = {show(value)}: a message is in the loss (true, 1) or is not (false, 0); {_REMEDY}"
            )
        counts = message["role"] == "assistant" and not in_prompt
        if value is True and train_on != "all" and not counts:
            what = "a prompt" if in_prompt else f"what {message['role']!r} says"
            raise DataError(
                f"{where} has {key} = true, and {what} is not in the loss; leave {key} out, or set "
                'chat.train_on = "all"'
            )
        is_trained = is_trained and bool(value)
    return is_trained


def _messages(
    row: dict[str, Any], column: Any, names: Columns, where: str, role: str | None = None
) -> list[dict[str, Any]]:
    """The messages of a cell: a list of them, or a text of `role`'s; JSON of a list where there is no role."""
    value, wanted = row[column], f"{'a text or ' * (role is not None)}a list of messages"
    if isinstance(value, str):
        if role is not None:
            return [{"role": role, "content": _text(value, f"{where}: {column!r}", says_something=True)}]
        value = _parsed(value, column, where)
    messages: list[Any] = expect(value, list, f"{where}: {column!r}", wanted, _REMEDY)
    return [
        _message(message, names, f"{where}, message {number} of {column!r}")
        for number, message in enumerate(messages, 1)
    ]


def _optional(row: dict[str, Any], column: str, where: str) -> str:
    """The text of a cell, which may be empty."""
    text = _text("" if row[column] is None else row[column], f"{where}: {column!r}")
    return text if text.strip() else ""


def _parsed(text: str, column: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: {column!r} is a text, and not one of JSON ({error}); name another column, or repair the row"
        ) from None


def _message(message: Any, names: Columns, where: str) -> dict[str, Any]:
    role_key, content_key = names.role_key, names.content_key
    found = expect(message, dict, where, f"{{{role_key}, {content_key}}}", _REMEDY)
    message = {key: value for key, value in found.items() if value is not None}  # columns of other rows
    called = content_key not in message and message.get("tool_calls")
    role = message.pop(role_key, None)
    if not isinstance(role, str) or (content_key not in message and not called):
        there = ", ".join(map(repr, message if role is None else [role_key, *message])) or "nothing"
        remedy = "name its keys in chat.role_key and content_key"
        if {FORMATS["sharegpt"].role_key, FORMATS["sharegpt"].content_key} <= message.keys():
            remedy = 'set chat.format = "sharegpt"'
        raise DataError(f"{where} has {there}, and needs a {role_key} and a {content_key}; {remedy}")
    if names.roles and role not in names.roles:
        raise DataError(
            f"{where} has {role_key} = {role!r}, and the roles known are {', '.join(names.roles)}; add it to "
            "chat.roles, with the template's name of it, or leave the row out"
        )
    role = names.roles.get(role, role)
    if called:
        return message | {"role": role}
    content = message.pop(content_key)
    if isinstance(content, list):  # of texts, as vision models take them
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    f"{where} has a part of type {kind!r}: only texts are trained on; take it out, or leave the row out"
                )
        content = "".join(part["text"] for part in content)
    # A message of tool calls or thoughts needs no text.
    more = role == "tool" or any(message.get(key) for group in SAID_ELSEWHERE for key in group)
    return message | {"role": role, "content": _text(content, where, says_something=not more)}


def _text(value: object, where: str, *, says_something: bool = False) -> str:
    text = expect(value, str, where, "a text", _REMEDY)
    if says_something and not text.strip():
        raise DataError(f"{where} is empty; {_REMEDY}")
    return text
