"""Rows as conversations: which messages a row holds, and whether each is one that a chat template can write out.

What counts in the loss, and tokens, are in `chat.py`.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from titanplans.config.sections.model import Chat
from titanplans.errors import DataError

_REMEDY = "repair the row or leave it out"


class Conversation(NamedTuple):
    """A row's messages, as transformers' `apply_chat_template` takes them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    """What the assistant could call, from the row's column "tools"."""
    prompt: int
    """Messages at the beginning in which nothing counts: those of a prompt."""


def conversation_of(row: object, chat: Chat, where: str) -> Conversation:
    """Return the conversation of a row, which has a column of messages, or one of a prompt and one of its completion.

    Args:
        row: columns by name.
        chat: the names of the columns.
        where: the file and the row, for messages.

    Raises:
        DataError: it has no such column, no message, or a message without a role or with a content that is no text.
    """
    if not isinstance(row, dict):
        raise DataError(
            f"{where} holds a value of type {type(row).__name__} where there should be an object; {_REMEDY}"
        )
    own, prompt, completion = columns_of(list(row), chat, where)
    if own is not None:
        messages, before = _messages(row[own], own, where), 0
    else:
        asked = _messages(row[prompt], prompt, where, "user")
        messages, before = asked + _messages(row[completion], completion, where, "assistant"), len(asked)
    if not messages:
        raise DataError(f"{where} holds an empty conversation; {_REMEDY}")
    tools: Any = row.get("tools")
    if isinstance(tools, str):
        tools = _parsed(tools, "tools", where)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f'{where}: "tools" is not a list of objects, each the schema of a tool; {_REMEDY}')
    return Conversation(messages, tools or None, before)


def columns_of(there: Sequence[str], chat: Chat, where: str) -> tuple[str | None, str, str]:
    """Return the columns of messages, or None in its place, of prompts and of completions.

    Raises:
        DataError: `there` are neither the one nor the other two.
    """
    if chat.messages_column in there:
        return chat.messages_column, "", ""
    if {chat.prompt_column, chat.completion_column} <= set(there):
        return None, chat.prompt_column, chat.completion_column
    found = ", ".join(map(repr, sorted(there))) or "none"
    raise DataError(
        f"messages_column = {chat.messages_column!r}: {where} has the columns {found}; name the one with the messages in "
        "[training.chat] messages_column, or those of prompts and their answers in prompt_column and completion_column"
    )


def _messages(value: object, column: str, where: str, role: str | None = None) -> list[dict[str, Any]]:
    """The messages of a cell: a list of them, or a text of `role`'s; JSON of a list where there is no role."""
    if isinstance(value, str):
        if role is not None:
            return [{"role": role, "content": _text(value, f"{where}: {column!r}")}]
        value = _parsed(value, column, where)
    if not isinstance(value, list):
        found = "no value" if value is None else f"a value of type {type(value).__name__}"
        raise DataError(
            f"{where}: {column!r} holds {found} where there should be a list of messages; {_REMEDY}"
        )
    return [
        _message(message, f"{where}, message {number} of {column!r}")
        for number, message in enumerate(value, 1)
    ]


def _parsed(text: str, column: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: {column!r} is a text, and not one of JSON ({error}); name another column, or repair the row"
        ) from None


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DataError(f"{where} is of type {type(message).__name__}, and no {{role, content}}; {_REMEDY}")
    message = {key: value for key, value in message.items() if value is not None}  # columns of other rows
    called = "content" not in message and message.get("tool_calls")
    if not isinstance(message.get("role"), str) or ("content" not in message and not called):
        there = ", ".join(map(repr, message)) or "nothing"
        raise DataError(
            f"{where} has {there}, and needs a role and a content; rename them, as 'from' to 'role' and 'value' to 'content'"
        )
    if called:
        return message
    return message | {"content": _content(message["content"], where)}


def _content(content: object, where: str) -> str:
    """A content as one text: also a list of texts, as vision models take them."""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    f"{where} has a part of type {kind!r}: only texts are trained on; take it out, or leave the row out"
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(
            f"{where} has a content of type {type(content).__name__} where there should be a text; {_REMEDY}"
        )
    return _text(content, where)


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where} holds half of a character (a lone surrogate); {_REMEDY}") from None
    return text
