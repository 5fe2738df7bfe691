"""How rows of conversations are laid out: names of columns and of a message's keys, by the name of a format.

A format is what `[training.chat]` leaves unset; reading rows is in `messages.py`, and is the same for all.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from titanplans.config.sections.data import Chat
from titanplans.errors import DataError


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
