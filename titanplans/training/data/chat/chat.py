"""`ChatFormat` converts rows to tokens of conversations, and decides which tokens count in the loss.

`messages.py` reads a row's messages, and `template.py` writes them with the chat template.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanplans.config.sections.data import Chat
from titanplans.errors import DataError
from titanplans.training.data.chat.messages import (
    Conversation,
    find_columns,
    read_conversation,
    resolve_columns,
)
from titanplans.training.data.chat.template import ChatTemplate

_log = logging.getLogger(__name__)
_VERSION = 4
"""Version of the tokens that are cached for a row. Raise it when the tokens of a row change, so that older caches are not
used."""


@dataclass(frozen=True)
class Tokens:
    """A conversation's tokens."""

    ids: np.ndarray
    """`[n]` int32."""
    counted: np.ndarray
    """`[n]` bool: which tokens count in the loss."""

    def to_bytes(self) -> bytes:
        """Return ids and `counted` in 4 bytes per token."""
        # The id of a token that does not count is stored as its complement, which is negative.
        return np.where(self.counted, self.ids, ~self.ids).astype("<i4").tobytes()

    @classmethod
    def from_bytes(cls, row: Any) -> "Tokens":
        """Return the tokens that `to_bytes` has encoded."""
        signed = np.frombuffer(row, "<i4")
        return cls(np.where(signed < 0, ~signed, signed), signed >= 0)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, slice_: slice) -> "Tokens":
        return Tokens(self.ids[slice_], self.counted[slice_])

    @property
    def has_counted_tokens(self) -> bool:
        """Whether any token but the first, which is never predicted, counts."""
        return bool(self.counted[1:].any())


class ChatFormat:
    """Reads rows as conversations; the counterpart of `TextColumn`, which reads rows as text.

    Args:
        chat: the options in [training.chat], or in the chat of a source.
        folder: the folder of the tokenizer and its chat template.
        seq_len: tokens per sequence.

    Attributes:
        vocabulary: the tokenizer's largest id plus one.
        stops: ids of the tokens that end generation.
        key, identity: see `TextColumn`.

    Raises:
        DataError: the tokenizer or the template is missing, or can't be used.
    """

    features = {"conversation": "binary", "where": "string"}  # noqa: RUF012
    """Names and types of the Arrow columns of a row that has been read: its tokens, and its file and row."""

    def __init__(self, chat: Chat, folder: str, seq_len: int):
        import transformers

        self._chat, self.seq_len, self.packing = chat, seq_len, chat.packing
        self._template = ChatTemplate(chat, folder)
        self.vocabulary, self.stops = self._template.vocabulary, frozenset(self._template.stops)
        self._shortened_count = 0  # conversations that this process has dropped or truncated
        options = [chat.train_on, resolve_columns(chat)]
        digest = hashlib.sha256(json.dumps([*options, *self._template.depends_on]).encode()).hexdigest()[:16]
        self.key = ["chat", digest, transformers.__version__, _VERSION]
        self.identity = {"chat": f"{digest}, train_on = {chat.train_on!r}"}

    def columns(self, available: Sequence[str], where: str) -> list[str]:
        """Return which of the `available` columns to read. Raises DataError if one is missing."""
        names = find_columns(available, self._chat, where)
        columns = [getattr(names, field) for field in names._fields if field.endswith("_column")]
        return [*filter(None, columns), *sorted({"tools", "weight"} & set(available))]

    def read(self, row: object, where: str) -> dict[str, Any]:
        """Return a row's conversation in the form in which Arrow stores it. A conversation of which no token counts is
        stored without tokens."""
        tokens = self.tokens(read_conversation(row, self._chat, where), where)
        return {"conversation": tokens.to_bytes() if tokens.has_counted_tokens else b"", "where": where}

    def fragments(self, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the record, since a conversation is one document."""
        yield record

    def document(self, fragment: dict[str, Any]) -> Tokens | None:
        """Return the tokens of a conversation, truncated to a sequence if necessary; None if it is left out."""
        tokens, where = Tokens.from_bytes(fragment["conversation"]), fragment["where"]
        fitted = self.fit(tokens, where)
        if fitted is None or len(fitted) < len(tokens):
            self._shortened_count += 1
            if self._shortened_count.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th and so on
                reason = f"{len(tokens):,} tokens" if len(tokens) else "none of its tokens count"
                _log.info(
                    f"this process has left out or truncated {self._shortened_count:,} conversations; the newest: {where}, "
                    f"{reason}"
                )
        return fitted

    def tokens(self, conversation: Conversation, where: str) -> Tokens:
        """Return a conversation's tokens, and which of them count.

        The chat template may mark what the assistant says with `{% generation %}`. Without marks, an answer begins where
        the earlier conversation ends, including the template's generation prompt. A token that lies partly in an answer
        counts, as in transformers.

        Raises:
            DataError: the template can't write the conversation, or what the assistant says can't be located.
        """
        conversation = self._template.with_parsed_arguments(conversation, where)
        messages, train_on = conversation.messages, self._chat.train_on
        text = self._template.write(conversation, where)
        encoding = self._template.tokenise(conversation, where)
        ids = np.asarray(encoding["input_ids"], np.int32)
        answers = [n for n, m in enumerate(messages) if m["role"] == "assistant" and n >= conversation.prompt]
        answers = answers[-1:] if train_on == "last" else answers
        answers = [n for n in answers if n not in conversation.excluded]
        begin, end = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2).T

        def overlaps(first: int, last: int) -> np.ndarray:
            """Return which tokens overlap the characters from `first` to `last`."""
            return (begin < last) & (end > first) & (first < last)

        if train_on == "all":
            counted = np.ones(len(ids), bool)
            for n in conversation.excluded:
                counted &= ~overlaps(*self._message_span(conversation, n, text, where, prompt=False))
            return Tokens(ids, counted)
        counted = np.zeros(len(ids), bool)
        if self._template.has_marks:
            for first, last in self._marked_spans(conversation, answers, where):
                counted |= overlaps(first, last)
            return Tokens(ids, counted)
        for n in answers:
            if n == 0:
                raise DataError(
                    f"{where}: the assistant begins, and {self._template.origin} has no {{% generation %}} marks, "
                    "without which its first answer can't be located; leave the row out, or give a "
                    "chat_template with these marks"
                )
            answer = overlaps(*self._message_span(conversation, n, text, where, prompt=True))
            counted |= answer
            after = int(np.flatnonzero(answer)[-1]) + 1 if answer.any() else len(ids)
            # In templates like GLM's the role token of the next message ends the turn. It counts if the answer has no stop
            # token.
            if after < len(ids) and ids[after] in self.stops and not self.stops & set(ids[answer].tolist()):
                counted[after] = True
        return Tokens(ids, counted)

    def _message_span(
        self, conversation: Conversation, n: int, text: str, where: str, *, prompt: bool
    ) -> tuple[int, int]:
        """Return the span of message `n` in `text`, in characters; with `prompt`, it excludes the generation prompt."""
        first, last = self._template.prefix_length(conversation, n, text, where, prompt=prompt), len(text)
        if n + 1 < len(conversation.messages):
            last = self._template.prefix_length(conversation, n + 1, text, where, prompt=False)
        return first, last

    def _marked_spans(
        self, conversation: Conversation, answers: list[int], where: str
    ) -> Iterator[tuple[int, int]]:
        """Yield the marked spans of `answers`, in characters."""
        messages = conversation.messages
        marks = self._template.marks(conversation, len(messages), where)
        if len(answers) == sum(message["role"] == "assistant" for message in messages):
            yield from marks
            return
        # The conversation up to an answer has more marks than the conversation before it: these are the answer's marks.
        for n in answers:
            before = len(self._template.marks(conversation, n, where)) if n else 0
            after = len(self._template.marks(conversation, n + 1, where))
            if not before < after <= len(marks):
                raise DataError(
                    f"{where}: {self._template.origin} does not mark message {n + 1} by itself, so it can't be told from "
                    "answers that are not in the loss; put {% generation %} around each answer, or leave the row out"
                )
            yield from marks[before:after]

    def stops_in(self, tokens: Tokens) -> bool:
        """Return whether a token that ends generation is among the tokens that count."""
        return not self.stops.isdisjoint(tokens.ids[1:][tokens.counted[1:]].tolist())

    @property
    def missing_stop_note(self) -> str:
        """A warning that no conversation teaches the model to end its turn, and what to do."""
        names = " or ".join(map(repr, self._template.stops.values())) or "none is named"
        remedy = "write one at the end of each answer in a chat_template"
        if self._template.has_marks:
            remedy = "put one inside its {% generation %} marks"
        return (
            f"{self._template.origin}: no answer ends in a stop token ({names}, according to eos_token in "
            "tokenizer_config.json and eos_token_id in generation_config.json), so the model does not learn to end its "
            f"turn; {remedy}, or name the token that ends a turn in eos_token_id"
        )

    def fit(self, tokens: Tokens, where: str) -> Tokens | None:
        """Truncate a conversation to a sequence, as the options say. Return None if it is left out, or if no token counts.

        Raises:
            DataError: the conversation is too long, and truncation = "error".
        """
        limit = self.seq_len + 1
        if len(tokens) > limit:
            if self._chat.truncation == "error":
                raise DataError(
                    f'{where} has {len(tokens)} tokens, more than seq_len + 1 = {limit}, and truncation = "error"; raise '
                    'seq_len, leave the row out, or set chat.truncation to "drop", "left" or "right"'
                )
            slices = {"drop": slice(0), "left": slice(-limit, None), "right": slice(limit)}
            tokens = tokens[slices[self._chat.truncation]]
        return tokens if tokens.has_counted_tokens else None

    def describe_exclusions(self) -> str:
        """Return a phrase that says what a data set lacks if all its rows are left out."""
        return (
            f"no conversation in which the assistant says something, within seq_len = {self.seq_len} tokens "
            f'(chat.train_on = "{self._chat.train_on}", truncation = "{self._chat.truncation}")'
        )
