"""`read_conversation`: read and check a row's messages. `resolve_columns` returns the names of their columns and keys."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from titanplans.config.sections.data import Chat
from titanplans.errors import DataError
from titanplans.text import show
from titanplans.training.data.data_errors import expect

_REMEDY = "repair the row or leave it out"
TRAINED_KEYS = ("weight", "loss", "train")
"""Keys with which a message says whether it is trained on; 0 or false excludes it from the loss."""
OTHER_CONTENT_KEYS = (("tool_calls",), ("function_call",), ("reasoning_content", "reasoning", "thinking"))
"""Keys of an assistant's message other than its content. The keys of one group mean the same thing in different data
sets."""


class Columns(NamedTuple):
    """The names of a row's columns and of a message's keys, as in [training.chat]; None: no such column is read."""

    messages_column: str | None = None
    role_key: str = "role"
    content_key: str = "content"
    roles: Mapping[str, str] = {}
    """Maps each role in a row to the template's name for it; empty: rows use the template's names."""
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
"""The names that each value of training.chat.format stands for."""


def resolve_columns(chat: Chat) -> Columns:
    """Return the names of columns and keys: those that the job sets, and the defaults of its format for the others."""
    options: dict[str, Any] = {
        name: value for name in Columns._fields if (value := getattr(chat, name)) is not None
    }
    defaults = FORMATS[chat.format]
    options["roles"] = {**defaults.roles, **options.get("roles", {})}
    return defaults._replace(**options)


def find_columns(available: Sequence[str], chat: Chat, where: str) -> Columns:
    """Return the columns of a row to read: messages, or a prompt and its completion; None for columns that the row lacks.

    Args:
        available: the names of the row's columns.
        chat: the job's options.
        where: the file or the row, for the message.

    Raises:
        DataError: the row has neither, or lacks a column that an option names.
    """
    names = resolve_columns(chat)
    problem = f"{where} has the columns {', '.join(map(repr, sorted(available))) or 'none'}"
    if names.messages_column in available:
        for option in ("prompt_column", "completion_column", "input_column"):
            if (value := getattr(chat, option)) is not None:
                raise DataError(
                    f"{option} = {value!r}: {where} holds messages, which are read instead; leave it out"
                )
        names = names._replace(prompt_column=None, completion_column=None, input_column=None)
    elif {names.prompt_column, names.completion_column} <= set(available):
        names = names._replace(messages_column=None)
    else:
        options = ("prompt_column", "completion_column")
        wants_pairs = chat.messages_column is None and any(
            getattr(chat, option) is not None for option in options
        )
        missing = (option for option in options if getattr(names, option) not in available)
        option = "messages_column" if names.messages_column and not wants_pairs else next(missing)
        fitting_formats = [
            f', or set format = "{name}"'
            for name, other in FORMATS.items()
            if name != chat.format
            and (
                other.messages_column in available
                or {other.prompt_column, other.completion_column} <= set(available)
            )
        ]
        raise DataError(
            f"{option} = {getattr(names, option)!r}: {problem}; name the column of messages in chat.messages_column, or the "
            f"columns of prompts and their answers in prompt_column and completion_column{''.join(fitting_formats[:1])}"
        )
    for option in ("input_column", "system_column"):
        if getattr(names, option) not in available:
            if (value := getattr(chat, option)) is not None:
                raise DataError(f"{option} = {value!r}: {problem}; name one of them, or leave it out")
            without: dict[str, Any] = {option: None}
            names = names._replace(**without)
    alpaca = FORMATS["alpaca"]
    if (
        names.prompt_column == alpaca.prompt_column
        and names.input_column is None
        and alpaca.input_column in available
    ):
        raise DataError(
            f"prompt_column = {names.prompt_column!r}: {where} also has {alpaca.input_column!r}, which would not be read; "
            'set chat.format = "alpaca", or input_column'
        )
    return names


class Conversation(NamedTuple):
    """A row's messages in the form of transformers' `apply_chat_template`."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    """The tools of the assistant, from the row's column "tools"."""
    prompt: int
    """The number of messages at the beginning that are a prompt, whose tokens do not count in the loss."""
    excluded: frozenset[int] = frozenset()
    """Indices of messages that the row excludes from the loss."""


def read_conversation(row: Any, chat: Chat, where: str) -> Conversation:
    """Return the conversation of a row with a column of messages, or with columns of a prompt and its completion.

    Args:
        row: the row.
        chat: the job's options.
        where: the row's file and number, for messages.

    Raises:
        DataError: the row lacks the columns, has a weight other than 1, or has no messages; or a message has no known role,
            or its content is not a text or is empty.
    """
    row = expect(row, dict, where, "an object", _REMEDY)
    names = find_columns(list(row), chat, where)
    if (weight := row.get("weight")) is not None and weight != 1:
        raise DataError(
            f"{where} has weight = {show(weight)}, but all rows of a source have the same weight; leave the row out, or put "
            "rows of different weights into different sources ([[data.sources]] weight)"
        )
    if names.messages_column is not None:
        messages, prompt_length = _read_messages(row, names.messages_column, names, where), 0
    else:
        prompt = _read_messages(row, names.prompt_column, names, where, "user")
        if names.input_column is not None and (
            input_text := _read_optional_text(row, names.input_column, where)
        ):
            if len(prompt) != 1:
                raise DataError(
                    f"{where}: {names.input_column!r} belongs to a prompt that is a text, but {names.prompt_column!r} holds "
                    f"messages; {_REMEDY}"
                )
            prompt[0]["content"] += f"\n\n{input_text}"
        completion = _read_messages(row, names.completion_column, names, where, "assistant")
        messages, prompt_length = prompt + completion, len(prompt)
    if not messages:
        raise DataError(f"{where} holds an empty conversation; {_REMEDY}")
    if names.system_column is not None and (system := _read_optional_text(row, names.system_column, where)):
        messages, prompt_length = [{"role": "system", "content": system}, *messages], prompt_length + 1
    tools: Any = row.get("tools")
    if isinstance(tools, str):
        tools = _parse_json(tools, "tools", where)
    for tool in expect(tools or [], list, f"{where}: 'tools'", "a list of schemas", _REMEDY):
        expect(tool, dict, f"{where}: 'tools'", "a list of schemas", _REMEDY)
    excluded = {
        n
        for n, message in enumerate(messages)
        if not _pop_is_trained(
            message, chat.train_on, f"{where}, message {n + 1}", in_prompt=n < prompt_length
        )
    }
    return Conversation(messages, tools or None, prompt_length, frozenset(excluded))


def _pop_is_trained(message: dict[str, Any], train_on: str, where: str, *, in_prompt: bool) -> bool:
    """Remove TRAINED_KEYS, which templates don't know, from a message; return whether it stays in the loss."""
    is_trained = True
    for key in TRAINED_KEYS:
        value = message.pop(key, None)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(
                f"{where} has {key} = {show(value)}: a message is in the loss (true, 1) or not (false, 0); {_REMEDY}"
            )
        counts = message["role"] == "assistant" and not in_prompt
        if value is True and train_on != "all" and not counts:
            subject = "a prompt" if in_prompt else f"what {message['role']!r} says"
            raise DataError(
                f"{where} has {key} = true, but {subject} is not in the loss; leave {key} out, or set "
                'chat.train_on = "all"'
            )
        is_trained = is_trained and bool(value)
    return is_trained


def _read_messages(
    row: dict[str, Any], column: Any, names: Columns, where: str, role: str | None = None
) -> list[dict[str, Any]]:
    """Return the messages in a cell. The cell is a list, or a text: one message if `role` is set, otherwise a list in
    JSON."""
    value, expected = row[column], f"{'a text or ' * (role is not None)}a list of messages"
    if isinstance(value, str):
        if role is not None:
            return [{"role": role, "content": _read_text(value, f"{where}: {column!r}", allow_empty=False)}]
        value = _parse_json(value, column, where)
    messages: list[Any] = expect(value, list, f"{where}: {column!r}", expected, _REMEDY)
    return [
        _read_message(message, names, f"{where}, message {number} of {column!r}")
        for number, message in enumerate(messages, 1)
    ]


def _read_optional_text(row: dict[str, Any], column: str, where: str) -> str:
    """Return the text of a cell; "" if it is null or blank."""
    text = _read_text("" if row[column] is None else row[column], f"{where}: {column!r}")
    return text if text.strip() else ""


def _parse_json(text: str, column: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: {column!r} is a text that is not JSON ({error}); name another column, or repair the row"
        ) from None


def _read_message(message: Any, names: Columns, where: str) -> dict[str, Any]:
    role_key, content_key = names.role_key, names.content_key
    fields = expect(message, dict, where, f"{{{role_key}, {content_key}}}", _REMEDY)
    # Arrow gives each message the keys of all other messages, with the value null.
    message = {key: value for key, value in fields.items() if value is not None}
    has_only_calls = content_key not in message and message.get("tool_calls")
    role = message.pop(role_key, None)
    if not isinstance(role, str) or (content_key not in message and not has_only_calls):
        keys = ", ".join(map(repr, message if role is None else [role_key, *message])) or "nothing"
        remedy = "name its keys in chat.role_key and content_key"
        if {FORMATS["sharegpt"].role_key, FORMATS["sharegpt"].content_key} <= message.keys():
            remedy = 'set chat.format = "sharegpt"'
        raise DataError(f"{where} has {keys}, but needs a {role_key} and a {content_key}; {remedy}")
    if names.roles and role not in names.roles:
        raise DataError(
            f"{where} has {role_key} = {role!r}, but the known roles are {', '.join(names.roles)}; add it to "
            "chat.roles, with the template's name for it, or leave the row out"
        )
    role = names.roles.get(role, role)
    if has_only_calls:
        return message | {"role": role}
    content = message.pop(content_key)
    if isinstance(content, list):  # a list of texts, as for vision models
        for item in content:
            kind = item.get("type") if isinstance(item, dict) else type(item).__name__
            if kind != "text" or not isinstance(item.get("text"), str):
                raise DataError(
                    f"{where} has content of type {kind!r}, but only texts are trained on; remove it, or leave the row out"
                )
        content = "".join(item["text"] for item in content)
    # A message of a tool, and a message with tool calls or thoughts, may have no text.
    may_be_empty = role == "tool" or any(message.get(key) for group in OTHER_CONTENT_KEYS for key in group)
    return message | {"role": role, "content": _read_text(content, where, allow_empty=may_be_empty)}


def _read_text(value: object, where: str, *, allow_empty: bool = True) -> str:
    text = expect(value, str, where, "a text", _REMEDY)
    if not allow_empty and not text.strip():
        raise DataError(f"{where} is empty; {_REMEDY}")
    return text
