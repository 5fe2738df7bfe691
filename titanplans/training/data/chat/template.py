"""The chat template of a tokenizer's folder, as transformers applies it: Jinja in a sandbox; and its limits.

Which of the tokens count in the loss is decided in `chat.py`.
"""

import contextlib
import copy
import functools
import inspect
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from titanplans.config.sections.data import Chat
from titanplans.errors import DataError
from titanplans.training.data.chat.messages import SAID_ELSEWHERE, Conversation
from titanplans.training.data.reading import refusing

_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""As transformers looks for it."""
_LOOKS_LIKE_A_TOKEN = re.compile("<[|\uff5c][^<>|\uff5c\\s{}]+[|\uff5c]>")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_REMEDY = "repair the template or the row, or leave the row out"
_DATE = (
    "; if the template asks for the date (strftime_now), which is not given, since another day's start would read other "
    "data: give the variable that it takes instead in chat_template_kwargs, such as date_string, or a template of your own"
)


class ChatTemplate:
    """Writes conversations out, and tokenises them, by the tokenizer and the template of `folder`.

    Attributes:
        shown: where the template is from, in words.
        marked: whether it marks the assistant's words: `{% generation %}`.
        stops: ids of the tokens at which generation ends, by the files of `folder`, with their texts.

    Raises:
        DataError: the tokenizer or the template is missing, or can't be used.
    """

    def __init__(self, chat: Chat, folder: str):
        import transformers

        where = f"hf_assets_path = {folder!r}"
        files = sorted(Path(folder).glob("*.json")) + sorted(Path(folder).glob("*.jinja"))
        with refusing(f"{where}: its tokenizer can't be used", "give another"):
            tokenizer = _load(folder, tuple((file.name, file.stat().st_mtime_ns) for file in files))
        if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
            raise DataError(
                f"{where}: its tokenizer, {type(tokenizer).__name__}, doesn't say where its tokens lie in the text; give "
                "one with a tokenizer.json"
            )
        self._tokenizer, self._train_on = tokenizer, chat.train_on
        self._template, self.shown = _find(chat.chat_template, tokenizer, where)
        self.marked = _GENERATION.search(self._template) is not None
        variables: dict[str, Any] = dict(chat.chat_template_kwargs or {})
        taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages", "strftime_now"}
        if taken := taken & variables.keys():
            raise DataError(
                f"chat_template_kwargs has {min(taken)!r}, which is no variable of a template's own; leave it out"
            )
        with refusing(f"{self.shown} is no valid Jinja", "repair it"):
            unset = _unset(self._template, {*tokenizer.special_tokens_map, *variables})
        if unset:
            raise DataError(
                f"{self.shown} writes {unset[0]}, which tokenizer_config.json does not define: nothing would stand there; "
                f"define it, or give {unset[0]} in chat_template_kwargs"
            )
        self._variables: dict[str, Any] = tokenizer.special_tokens_map | variables | {"strftime_now": None}
        self.vocabulary = max(tokenizer.get_vocab().values()) + 1
        """One more than the largest id."""
        self._no_tokens = set(_LOOKS_LIKE_A_TOKEN.findall(self._template)) - tokenizer.get_vocab().keys()
        self.stops = {id_: tokenizer.decode([id_]) for id_ in _stop_ids(tokenizer, Path(folder))}
        self.depends_on = [
            self._template,
            variables,
            tokenizer.backend_tokenizer.to_str(),
            sorted(self.stops),
        ]
        """JSON values."""

    def write(self, conversation: Conversation, where: str) -> str:
        """Return a conversation as text.

        Raises:
            DataError: the template refuses it, leaves a message out, or writes a mark that is no token; names `where`.
        """
        text = self._text(conversation, len(conversation.messages), where)
        for mark in self._no_tokens:
            if mark in text:
                raise DataError(
                    f"{self.shown} writes {mark!r}, which is no token of the tokenizer, and would be read as text; add it "
                    "to the tokenizer and the model's vocabulary, or take the template that belongs to the tokenizer"
                )
        messages = conversation.messages
        for n, message in enumerate(messages):
            content = message.get("content", "")
            if content.strip() in text:
                continue
            # Written in another way, or not at all?
            other = [*messages[:n], message | {"content": f"{content} x"}, *messages[n + 1 :]]
            if self._text(conversation._replace(messages=other), len(messages), where) == text:
                raise DataError(
                    f"{where}: {self.shown} leaves out what {message['role']!r} says in message {n + 1}; rename the role, "
                    "or leave the row out"
                )
        for n, message in enumerate(messages):
            for group in SAID_ELSEWHERE:
                said = {key: value for key in group if (value := message.get(key))}
                if said and not self._writes(conversation, n, said, text, where):
                    raise DataError(
                        f"{where}: {self.shown} leaves out the {min(said)} of message {n + 1}; give a chat_template that "
                        "writes it, or leave the row out"
                    )
        return text

    def _writes(
        self, conversation: Conversation, n: int, said: dict[str, Any], text: str, where: str
    ) -> bool:
        """Return whether the values that message `n` has apart from its content are written, while it is the last."""
        if any(isinstance(value, str) and value.strip() in text for value in said.values()):
            return True
        *before, message = conversation.messages[: n + 1]
        message = {"content": "", **message}
        without = {key: value for key, value in message.items() if key not in said}
        with_them = self._text(conversation._replace(messages=[*before, message]), n + 1, where)
        try:
            return with_them != self._text(conversation._replace(messages=[*before, without]), n + 1, where)
        except DataError:
            return True  # without them the template refuses the message

    def settled(self, conversation: Conversation, where: str) -> Conversation:
        """Return the conversation with arguments of tool calls parsed where the template can't take them as JSON texts.

        OpenAI gives them as texts, which templates for objects quote a second time or refuse; others take texts alone.

        Raises:
            DataError: neither can be written, or a text is no JSON; names `where`.
        """
        texts = [call["arguments"] for call in _calls(conversation) if isinstance(call["arguments"], str)]
        if not texts:
            return conversation
        with contextlib.suppress(DataError):
            text = self._text(conversation, len(conversation.messages), where)
            if not any(json.dumps(arguments, ensure_ascii=False) in text for arguments in texts):
                return conversation
        parsed = conversation._replace(messages=copy.deepcopy(conversation.messages))
        for call in _calls(parsed):
            if isinstance(call["arguments"], str):
                with refusing(
                    f"{where}: the arguments of a tool call are no JSON", "repair the row or leave it out"
                ):
                    call["arguments"] = json.loads(call["arguments"])
        return parsed

    def tokenise(self, conversation: Conversation, where: str) -> Any:
        """Return what transformers makes of it: input_ids and offset_mapping."""
        offsets = {"return_offsets_mapping": True}
        n = len(conversation.messages)
        return self._apply(conversation, n, where, return_dict=True, tokenizer_kwargs=offsets)

    def marks(self, conversation: Conversation, messages: int, where: str) -> list[tuple[int, int]]:
        """Return the text between a marked template's marks, of the first messages, as characters from and to.

        By tokens transformers' assistant_masks say it, too, but not where a tokenizer leaves spaces out of the places of its
        tokens, as Llama 3's does: a mark that begins there ends the search, one that ends there lasts to the end.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        with refusing(f"{where}: {self.shown} can't write the conversation", _REMEDY):
            written: Any = render_jinja_template(
                [conversation.messages[:messages]],
                tools=conversation.tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self._variables,
            )
        return written[1][0]

    def length(
        self, conversation: Conversation, messages: int, text: str, where: str, *, prompt: bool
    ) -> int:
        """Return how many characters of `text`, which `write` returned, the first messages are.

        With `prompt`, followed by the template's beginning of the assistant's answer.

        Raises:
            DataError: by themselves they are written otherwise.
        """
        begins = self._text(conversation, messages, where, prompt=prompt) if messages else ""
        if not text.startswith(begins):
            last = ' or train_on = "last",' if self._train_on != "last" else ""
            raise DataError(
                f"{where}: {self.shown} writes the first {messages} messages otherwise where others follow, so "
                "what the assistant says can't be found in the whole; give a chat_template with {% generation %} around it,"
                f"{last} or leave the row out"
            )
        return len(begins)

    def _text(self, conversation: Conversation, messages: int, where: str, *, prompt: bool = False) -> str:
        return self._apply(conversation, messages, where, tokenize=False, add_generation_prompt=prompt)

    def _apply(self, conversation: Conversation, messages: int, where: str, **options: Any) -> Any:
        """transformers' apply_chat_template of the first messages."""
        remedy = _REMEDY + (_DATE if "strftime_now" in self._template else "")
        with refusing(f"{where}: {self.shown} can't write the conversation", remedy):
            return self._tokenizer.apply_chat_template(
                conversation.messages[:messages],
                tools=conversation.tools,
                chat_template=self._template,
                **options,
                **self._variables,
            )


def _calls(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """Yield the called functions that have arguments."""
    for message in conversation.messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and "arguments" in function:
                yield function


def _stop_ids(tokenizer: Any, folder: Path) -> set[int]:
    """Return the ids at which generation ends: of the tokenizer's eos_token, and of the configs in its folder."""
    stops = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            with refusing(f"{folder / name} can't be read", "repair it"):
                ids = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
                stops |= set(ids) if isinstance(ids, list) else {ids}
    return {id_ for id_ in stops if isinstance(id_, int)}


@functools.lru_cache(maxsize=1)
def _load(folder: str, _states: tuple[tuple[str, int], ...]) -> Any:
    """Load transformers' tokenizer of a folder, again only if its files have changed: each validation asks."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _find(path: str | None, tokenizer: Any, where: str) -> tuple[str, str]:
    """The template, and where it is from in words."""
    if path is not None:
        with refusing(f"chat_template = {path!r} can't be read", "name a Jinja file"):
            return Path(path).read_text(encoding="utf-8"), f"chat_template = {path!r}"
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where}: its tokenizer has no chat template (no chat_template.jinja, and no chat_template in "
            "tokenizer_config.json); give a folder that has one, or a Jinja file in chat.chat_template"
        )
    with refusing(where, "name a Jinja file in chat.chat_template"):  # several, and no default
        return tokenizer.get_chat_template(), f"{where}: its chat template"


def _unset(template: str, known: Collection[str]) -> list[str]:
    """The special tokens that a template writes untested and that are not `known`: Jinja writes nothing for them."""
    from jinja2 import Environment, nodes

    def names(node: Any) -> set[str]:
        own = {node.name} if isinstance(node, nodes.Name) else set()
        return own | {name.name for name in node.find_all(nodes.Name)}

    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", template))
    tests = [node.test for node in tree.find_all((nodes.If, nodes.CondExpr))]
    tests += tree.find_all((nodes.Test, nodes.Or, nodes.And))
    tests += [node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    tested = set().union(*map(names, tests))
    return [name for name in _SPECIAL if name in names(tree) - tested and name not in known]
