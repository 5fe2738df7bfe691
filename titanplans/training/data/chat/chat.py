"""Conversations as tokens, and which of them count in the loss.

What the assistant says is marked by the chat template itself, `{% generation %}`, or found: each answer begins where the
conversation before it, with the template's generation prompt, ends. Which messages a row holds is in `messages.py`, how they
are written in `template.py`.
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
from titanplans.training.data.chat.messages import Conversation, columns_of, conversation_of, laid_out
from titanplans.training.data.chat.template import ChatTemplate

_log = logging.getLogger(__name__)
_VERSION = 4
"""Of what these files make of a row: raise it with a change, so that no cache is read that another version wrote."""


@dataclass(frozen=True)
class Tokens:
    """A conversation's tokens."""

    ids: np.ndarray
    """`[n]` int32."""
    counted: np.ndarray
    """`[n]` bool: which count in the loss."""

    def to_bytes(self) -> bytes:
        """Return both in 4 bytes a token: what doesn't count is complemented, which makes it negative."""
        return np.where(self.counted, self.ids, ~self.ids).astype("<i4").tobytes()

    @classmethod
    def from_bytes(cls, row: Any) -> "Tokens":
        """Return what `to_bytes` wrote."""
        signed = np.frombuffer(row, "<i4")
        return cls(np.where(signed < 0, ~signed, signed), signed >= 0)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> "Tokens":
        return Tokens(self.ids[part], self.counted[part])

    @property
    def says_something(self) -> bool:
        """Whether any token but the first counts: the first can't be predicted."""
        return bool(self.counted[1:].any())


class ChatFormat:
    """Reads rows as conversations by the tokenizer and chat template of `folder`, as `TextColumn` reads rows as text.

    Raises:
        DataError: the tokenizer or the template is missing, or can't be used.
    """

    features = {"conversation": "binary", "where": "string"}  # noqa: RUF012
    """A row's tokens, and the file and the row that they are from."""

    def __init__(self, chat: Chat, folder: str, seq_len: int):
        import transformers

        self._chat, self.seq_len, self.packing = chat, seq_len, chat.packing
        self._template = ChatTemplate(chat, folder)
        self.vocabulary, self.stops = self._template.vocabulary, frozenset(self._template.stops)
        self._less = 0  # conversations that this process has left out or cut, of a stream
        chosen = [chat.train_on, laid_out(chat)]
        digest = hashlib.sha256(json.dumps([*chosen, *self._template.depends_on]).encode()).hexdigest()[:16]
        self.key = ["chat", digest, transformers.__version__, _VERSION]
        self.identity = {"chat": f"{digest}, train_on = {chat.train_on!r}"}

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        names = columns_of(there, self._chat, where)
        found = [getattr(names, field) for field in names._fields if field.endswith("_column")]
        return [*filter(None, found), *sorted({"tools", "weight"} & set(there))]

    def read(self, row: object, where: str) -> dict[str, Any]:
        """A conversation in which nothing counts has no tokens."""
        tokens = self.tokens(conversation_of(row, self._chat, where), where)
        return {"conversation": tokens.to_bytes() if tokens.says_something else b"", "where": where}

    def fragments(self, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A conversation is one document."""
        yield record

    def document(self, fragment: dict[str, Any]) -> Tokens | None:
        """None if it is left out. Of rows left out or cut the 1st, 2nd, 4th and so on are logged."""
        whole, where = Tokens.from_bytes(fragment["conversation"]), fragment["where"]
        tokens = self.fit(whole, where)
        if tokens is None or len(tokens) < len(whole):
            self._less += 1
            if self._less.bit_count() == 1:
                said = f"{len(whole):,} tokens" if len(whole) else "nothing in it counts"
                _log.info(
                    f"this process has left out or cut {self._less:,} conversations; the newest: {where}, {said}"
                )
        return tokens

    def tokens(self, conversation: Conversation, where: str) -> Tokens:
        """Return a conversation's tokens. One that begins in the prompt and ends in an answer counts, as for transformers.

        Raises:
            DataError: the template refuses it, or what the assistant says can't be found.
        """
        conversation = self._template.settled(conversation, where)
        messages, train_on = conversation.messages, self._chat.train_on
        text = self._template.write(conversation, where)
        written = self._template.tokenise(conversation, where)
        ids = np.asarray(written["input_ids"], np.int32)
        answers = [n for n, m in enumerate(messages) if m["role"] == "assistant" and n >= conversation.prompt]
        answers = answers[-1:] if train_on == "last" else answers
        answers = [n for n in answers if n not in conversation.excluded]
        begin, end = np.asarray(written["offset_mapping"], np.int64).reshape(-1, 2).T

        def within(first: int, last: int) -> np.ndarray:
            return (begin < last) & (end > first) & (first < last)

        if train_on == "all":
            counted = np.ones(len(ids), bool)
            for n in conversation.excluded:
                counted &= ~within(*self._message(conversation, n, text, where, prompt=False))
            return Tokens(ids, counted)
        counted = np.zeros(len(ids), bool)
        if self._template.marked:
            for first, last in self._marked(conversation, answers, where):
                counted |= within(first, last)
            return Tokens(ids, counted)
        for n in answers:
            if n == 0:
                raise DataError(
                    f"{where}: the assistant begins, and {self._template.shown} has no {{% generation %}} marks, by which "
                    "alone it could be told what it says; leave the row out, or give a chat_template with them"
                )
            answer = within(*self._message(conversation, n, text, where, prompt=True))
            counted |= answer
            after = int(np.flatnonzero(answer)[-1]) + 1 if answer.any() else len(ids)
            # In templates like GLM's the next message's role ends the turn.
            if after < len(ids) and ids[after] in self.stops and not self.stops & set(ids[answer].tolist()):
                counted[after] = True
        return Tokens(ids, counted)

    def _message(
        self, conversation: Conversation, n: int, text: str, where: str, *, prompt: bool
    ) -> tuple[int, int]:
        """Return the span of characters of message `n`; with `prompt`, without the beginning of an assistant's answer."""
        first, last = self._template.length(conversation, n, text, where, prompt=prompt), len(text)
        if n + 1 < len(conversation.messages):
            last = self._template.length(conversation, n + 1, text, where, prompt=False)
        return first, last

    def _marked(
        self, conversation: Conversation, answers: list[int], where: str
    ) -> Iterator[tuple[int, int]]:
        """Yield the marked spans of `answers`, which are told by how many marks the messages up to them have."""
        messages = conversation.messages
        marks = self._template.marks(conversation, len(messages), where)
        if len(answers) == sum(message["role"] == "assistant" for message in messages):
            yield from marks
            return
        for n in answers:
            before = len(self._template.marks(conversation, n, where)) if n else 0
            after = len(self._template.marks(conversation, n + 1, where))
            if not before < after <= len(marks):
                raise DataError(
                    f"{where}: {self._template.shown} has no marks for message {n + 1} alone, to tell it from answers "
                    "that are not in the loss; put {% generation %} around each answer, or leave the row out"
                )
            yield from marks[before:after]

    def stops_in(self, tokens: Tokens) -> bool:
        """Return whether a token at which generation ends counts."""
        return not self.stops.isdisjoint(tokens.ids[1:][tokens.counted[1:]].tolist())

    @property
    def never_stops(self) -> str:
        """Return in words that no conversation teaches the model to end its turn, and what to do."""
        names = " or ".join(map(repr, self._template.stops.values())) or "none is named"
        remedy = "write one at the end of each answer in a chat_template"
        if self._template.marked:
            remedy = "put one inside its {% generation %} marks"
        return (
            f"{self._template.shown}: no answer ends in a stop token ({names}, by eos_token in tokenizer_config.json and "
            f"eos_token_id in generation_config.json), so the model does not learn to end its turn; {remedy}, or name "
            "the token that ends a turn in eos_token_id"
        )

    def fit(self, tokens: Tokens, where: str) -> Tokens | None:
        """Return a conversation as it goes into a sequence; None if it is left out.

        Raises:
            DataError: it is too long, under truncation = "error".
        """
        most = self.seq_len + 1
        if len(tokens) > most:
            if self._chat.truncation == "error":
                raise DataError(
                    f'{where} has {len(tokens)} tokens, more than seq_len + 1 = {most}, and truncation = "error"; raise '
                    'seq_len, leave the row out, or set chat.truncation to "drop", "left" or "right"'
                )
            cuts = {"drop": slice(0), "left": slice(-most, None), "right": slice(most)}
            tokens = tokens[cuts[self._chat.truncation]]
        return tokens if tokens.says_something else None

    def what_is_left_out(self) -> str:
        """Return in words why all rows of a data set may have been left out."""
        return (
            f"no conversation in which the assistant says something, within seq_len = {self.seq_len} tokens "
            f'(chat.train_on = "{self._chat.train_on}", truncation = "{self._chat.truncation}")'
        )
