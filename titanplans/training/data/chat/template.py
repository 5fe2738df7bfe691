"""`ChatTemplate`: write and tokenise conversations with a chat template, as transformers does; refuse faulty templates."""

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
from titanplans.training.data.chat.messages import OTHER_CONTENT_KEYS, Conversation
from titanplans.training.data.data_errors import as_data_error

_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The pattern with which transformers looks for `{% generation %}`."""
_LOOKS_LIKE_A_TOKEN = re.compile("<[|\uff5c][^<>|\uff5c\\s{}]+[|\uff5c]>")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_REMEDY = "repair the template or the row, or leave the row out"
_DATE = (
    "; the date (strftime_now) is not available to a template, since a run on another day would have different data: set "
    "the variable that the template accepts instead, such as date_string, in chat_template_kwargs, or give a template of "
    "your own"
)


class ChatTemplate:
    """Writes conversations as text and tokenises them, with the tokenizer and the chat template of a folder.

    Args:
        chat: the options in [training.chat], or in the chat of a source.
        folder: the folder of the tokenizer.

    Attributes:
        origin: where the template is from, for messages.
        has_marks: whether the template marks what the assistant says with `{% generation %}`.
        vocabulary: the tokenizer's largest id plus one.
        stops: the texts of the tokens that end generation, by id, according to the files of the folder.
        depends_on: JSON values that the tokens of a conversation depend on.

    Raises:
        DataError: the tokenizer or the template is missing, or can't be used.
    """

    def __init__(self, chat: Chat, folder: str):
        import transformers

        where = f"hf_assets_path = {folder!r}"
        files = sorted(Path(folder).glob("*.json")) + sorted(Path(folder).glob("*.jinja"))
        with as_data_error(f"{where}: its tokenizer can't be used", "give another"):
            tokenizer = _load(folder, tuple((file.name, file.stat().st_mtime_ns) for file in files))
        if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
            raise DataError(
                f"{where}: its tokenizer, {type(tokenizer).__name__}, returns no offsets of tokens in the text; give "
                "a folder with a tokenizer.json"
            )
        self._tokenizer, self._train_on = tokenizer, chat.train_on
        self._template, self.origin = _find_template(chat.chat_template, tokenizer, where)
        self.has_marks = _GENERATION.search(self._template) is not None
        variables: dict[str, Any] = dict(chat.chat_template_kwargs or {})
        reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages", "strftime_now"}
        if reserved := reserved & variables.keys():
            raise DataError(
                f"chat_template_kwargs has {min(reserved)!r}, which is an argument of transformers; leave it out"
            )
        with as_data_error(f"{self.origin} is not valid Jinja", "repair it"):
            unset = _unset_tokens(self._template, {*tokenizer.special_tokens_map, *variables})
        if unset:
            raise DataError(
                f"{self.origin} writes {unset[0]}, which tokenizer_config.json does not define, so it would be missing in "
                f"the text; define it, or give {unset[0]} in chat_template_kwargs"
            )
        # strftime_now = None makes a template that asks for the date fail: the data would depend on the day of the run.
        self._variables: dict[str, Any] = tokenizer.special_tokens_map | variables | {"strftime_now": None}
        self.vocabulary = max(tokenizer.get_vocab().values()) + 1
        self._unknown_marks = set(_LOOKS_LIKE_A_TOKEN.findall(self._template)) - tokenizer.get_vocab().keys()
        self.stops = {id_: tokenizer.decode([id_]) for id_ in _stop_ids(tokenizer, Path(folder))}
        self.depends_on = [
            self._template,
            variables,
            tokenizer.backend_tokenizer.to_str(),
            sorted(self.stops),
        ]

    def write(self, conversation: Conversation, where: str) -> str:
        """Return a conversation as text; `where` is the file and row of the conversation, for messages.

        Raises:
            DataError: the template refuses it, leaves a message out, or writes a mark that is not a token.
        """
        text = self._text(conversation, len(conversation.messages), where)
        for mark in self._unknown_marks:
            if mark in text:
                raise DataError(
                    f"{self.origin} writes {mark!r}, which is not a token of the tokenizer, and would be read as text; add "
                    "it to the tokenizer and the model's vocabulary, or take the template that belongs to the tokenizer"
                )
        messages = conversation.messages
        for n, message in enumerate(messages):
            content = message.get("content", "")
            if content.strip() in text:
                continue
            # The template may write the content in another form. If the text stays the same with another content, the
            # template leaves the content out.
            other = [*messages[:n], message | {"content": f"{content} x"}, *messages[n + 1 :]]
            if self._text(conversation._replace(messages=other), len(messages), where) == text:
                raise DataError(
                    f"{where}: {self.origin} leaves out what {message['role']!r} says in message {n + 1}; rename the role, "
                    "or leave the row out"
                )
        for n, message in enumerate(messages):
            for group in OTHER_CONTENT_KEYS:
                values = {key: value for key in group if (value := message.get(key))}
                if values and not self._is_written(conversation, n, values, text, where):
                    raise DataError(
                        f"{where}: {self.origin} leaves out the {min(values)} of message {n + 1}; give a chat_template "
                        "that writes it, or leave the row out"
                    )
        return text

    def _is_written(
        self, conversation: Conversation, n: int, values: dict[str, Any], text: str, where: str
    ) -> bool:
        """Return whether the template writes `values`, fields of message `n` other than its content.

        The check writes only the conversation up to that message.
        """
        if any(isinstance(value, str) and value.strip() in text for value in values.values()):
            return True
        *before, message = conversation.messages[: n + 1]
        message = {"content": "", **message}
        without = {key: value for key, value in message.items() if key not in values}
        text_with = self._text(conversation._replace(messages=[*before, message]), n + 1, where)
        try:
            return text_with != self._text(conversation._replace(messages=[*before, without]), n + 1, where)
        except DataError:
            return True  # the template refuses the message without these fields, so it uses them

    def with_parsed_arguments(self, conversation: Conversation, where: str) -> Conversation:
        """Return the conversation, with the arguments of tool calls parsed if the template does not take them as JSON text.

        Raises:
            DataError: an argument is not valid JSON.
        """
        # In OpenAI's format the arguments are JSON texts. Some templates expect texts. Others expect objects, and quote a
        # text a second time or refuse it.
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
                with as_data_error(
                    f"{where}: the arguments of a tool call are not valid JSON",
                    "repair the row or leave it out",
                ):
                    call["arguments"] = json.loads(call["arguments"])
        return parsed

    def tokenise(self, conversation: Conversation, where: str) -> Any:
        """Return transformers' encoding of a conversation, with input_ids and offset_mapping."""
        offsets = {"return_offsets_mapping": True}
        n = len(conversation.messages)
        return self._apply(conversation, n, where, return_dict=True, tokenizer_kwargs=offsets)

    def marks(self, conversation: Conversation, messages: int, where: str) -> list[tuple[int, int]]:
        """Return the spans between the marks of `{% generation %}` in the first `messages`, in characters."""
        # transformers' assistant_masks is not used. Before 5.24 it is wrong for a tokenizer that leaves spaces out of its
        # offsets, such as Llama 3's: a span that begins with a space is lost, and so are all later spans; a span that ends
        # with a space extends to the end of the conversation.
        from transformers.utils.chat_template_utils import render_jinja_template

        with as_data_error(f"{where}: {self.origin} can't write the conversation", _REMEDY):
            rendered: Any = render_jinja_template(
                [conversation.messages[:messages]],
                tools=conversation.tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self._variables,
            )
        return rendered[1][0]

    def prefix_length(
        self, conversation: Conversation, messages: int, text: str, where: str, *, prompt: bool
    ) -> int:
        """Return the number of characters that the first `messages` take in `text`, which `write` returned.

        With `prompt` this includes the generation prompt, with which the template begins an answer.

        Raises:
            DataError: the template writes these messages differently when others follow.
        """
        prefix = self._text(conversation, messages, where, prompt=prompt) if messages else ""
        if not text.startswith(prefix):
            last = ' or train_on = "last",' if self._train_on != "last" else ""
            raise DataError(
                f"{where}: {self.origin} writes the first {messages} messages differently when others follow, so the "
                "assistant's answers can't be located; give a chat_template with {% generation %} around each answer,"
                f"{last} or leave the row out"
            )
        return len(prefix)

    def _text(self, conversation: Conversation, messages: int, where: str, *, prompt: bool = False) -> str:
        return self._apply(conversation, messages, where, tokenize=False, add_generation_prompt=prompt)

    def _apply(self, conversation: Conversation, messages: int, where: str, **options: Any) -> Any:
        """Call transformers' apply_chat_template for the first `messages`."""
        remedy = _REMEDY + (_DATE if "strftime_now" in self._template else "")
        with as_data_error(f"{where}: {self.origin} can't write the conversation", remedy):
            return self._tokenizer.apply_chat_template(
                conversation.messages[:messages],
                tools=conversation.tools,
                chat_template=self._template,
                **options,
                **self._variables,
            )


def _calls(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """Yield the function of each tool call that has arguments."""
    for message in conversation.messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and "arguments" in function:
                yield function


def _stop_ids(tokenizer: Any, folder: Path) -> set[int]:
    """Return the ids of the tokens that end generation: the tokenizer's eos_token, and eos_token_id of the configs."""
    stops = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            with as_data_error(f"{folder / name} can't be read", "repair it"):
                ids = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
                stops |= set(ids) if isinstance(ids, list) else {ids}
    return {id_ for id_ in stops if isinstance(id_, int)}


@functools.lru_cache(maxsize=1)
def _load(folder: str, _states: tuple[tuple[str, int], ...]) -> Any:
    """Load a folder's tokenizer with transformers. It is cached until a file changes, since each validation needs it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _find_template(path: str | None, tokenizer: Any, where: str) -> tuple[str, str]:
    """Return the template, and a description of where it is from."""
    if path is not None:
        with as_data_error(f"chat_template = {path!r} can't be read", "name a Jinja file"):
            return Path(path).read_text(encoding="utf-8"), f"chat_template = {path!r}"
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where}: its tokenizer has no chat template (no chat_template.jinja, and no chat_template in "
            "tokenizer_config.json); give a folder that has one, or a Jinja file in chat.chat_template"
        )
    # Fails for a tokenizer with several templates and no default.
    with as_data_error(where, "name a Jinja file in chat.chat_template"):
        return tokenizer.get_chat_template(), f"{where}: its chat template"


def _unset_tokens(template: str, defined: Collection[str]) -> list[str]:
    """Return the special tokens that are not defined, although a template uses them without a check."""
    # Jinja would write nothing for them.
    from jinja2 import Environment, nodes

    def names(node: Any) -> set[str]:
        name = {node.name} if isinstance(node, nodes.Name) else set()
        return name | {child.name for child in node.find_all(nodes.Name)}

    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", template))
    tests = [node.test for node in tree.find_all((nodes.If, nodes.CondExpr))]
    tests += tree.find_all((nodes.Test, nodes.Or, nodes.And))
    tests += [node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    tested = set().union(*map(names, tests))
    return [name for name in _SPECIAL if name in names(tree) - tested and name not in defined]
