"""The data: [data], [[data.sources]], [training.dataloader], [training.chat]."""

from typing import Literal

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import FilePath, Name, NaturalFloat, NaturalInt, PositiveInt


class DataLoader(Options, section="dataloader"):
    """Worker processes that prepare the batches."""

    num_workers: NaturalInt = 0
    """Worker processes a rank; 0: the training process itself."""

    persistent_workers: bool = False
    """Keep the workers from one epoch to the next; needs num_workers above 0."""

    pin_memory: bool = False
    """Hand over batches in page-locked memory, which copies to a GPU faster."""

    prefetch_factor: PositiveInt | None = None
    """Batches that each worker prepares in advance; needs num_workers above 0; unset: torch's choice."""


class Chat(
    Options, section="training.chat", of_bool={True: {"enable": True}, False: {}}, refuses=groups.chat
):
    """Conversations instead of text: written out by a chat template, and only the assistant's words count in the loss.

    Holds for validation, too.
    """

    enable: bool = False
    """Read rows of messages, or of a prompt and its completion, instead of text."""

    format: Literal["messages", "sharegpt", "alpaca"] = "messages"
    """Names of what the next keys leave unset: "messages", "sharegpt" (conversations, from, value), or "alpaca"."""

    messages_column: Name | None = None
    """Column or field that holds a conversation, a list of messages; unset: "messages", of "sharegpt" "conversations"."""

    role_key: Name | None = None
    """Key of a message that says who speaks; unset: "role", of "sharegpt" "from"."""

    content_key: Name | None = None
    """Key of a message's text; unset: "content", for "sharegpt" "value"."""

    roles: dict[str, Name] | None = None
    """The template's names of those who speak, by the rows'; others are refused. Of "sharegpt" they are added to its own."""

    prompt_column: Name | None = None
    """Column or field with a prompt, a text or messages, in rows without messages; unset: "prompt" or "instruction"."""

    input_column: Name | None = None
    """Column or field with a text that follows the prompt's, if it is not empty; unset: of "alpaca" "input"."""

    completion_column: Name | None = None
    """Column or field with what the assistant answers to the prompt, a text or messages; unset: "completion" or "output"."""

    system_column: Name | None = None
    """Column or field with a system's text, which comes first; unset: of "sharegpt" and "alpaca" "system", if there."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What counts in the loss: "assistant" what the assistant says, "last" its last answer alone, "all" every token."""

    chat_template: FilePath | None = None
    """Jinja file with the chat template; unset: the tokenizer's own."""

    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables for the template, such as enable_thinking or date_string."""

    truncation: Literal["drop", "left", "right", "error"] = "drop"
    """A conversation longer than seq_len is left out ("drop"), cut on the "left" or "right", or ends the job ("error")."""

    packing: bool = True
    """Several whole conversations in a sequence, which do not see each other; false: one, filled up."""


class SourceChat(
    Chat, section="data.sources.chat", of_bool={True: {"enable": True}, False: {}}, refuses=groups.chat
):
    """As [training.chat], of one source."""


class Corpus(Options):
    """Where text or conversations are."""

    dataset: Name = "stdlib"
    """"stdlib" (Python's standard library), "local", or a Hugging Face name ("owner/name:config"), which is streamed."""

    dataset_path: FilePath | None = None
    """File, folder or glob of .txt, .jsonl or .parquet files; with a Hugging Face name, a local copy of it."""

    dataset_split: Name = "train"
    """Part of the data set: "train", "validation" or "all"; for a Hugging Face name, one of its own splits."""

    text_column: Name = "text"
    """Column or field that holds the text, in a data set that has such; "content.body" is a field in a field."""


class DataSource(Corpus, section="data.sources", refuses=groups.source):
    """A source of a mixture: a table [[data.sources]]."""

    name: Name | None = None
    """Its name in metrics, messages and checkpoints; unset: its path, or its data set."""

    weight: NaturalFloat = 1.0
    """Its share of the rows, relative to the other sources' weights; 0: none. It may change where a job resumes."""

    chat: SourceChat = SourceChat()

    @property
    def title(self) -> str:
        """The name, or what stands for it."""
        return self.name or self.dataset_path or self.dataset


class Data(Options, section="data", refuses=groups.data):
    """How documents become rows of seq_len tokens, and the sources that they are from."""

    documents: Literal["apart", "joined"] | None = None
    """Documents of a row do not see each other ("apart"), or do ("joined"); unset: apart, if the model can."""

    packing: Literal["cut", "best_fit"] = "cut"
    """Documents are put end to end and cut into rows; or whole ones are packed by best fit, and rows are filled up."""

    long_documents: Literal["cut", "drop"] = "cut"
    """Under packing = "best_fit", a document longer than a row is cut into rows, or left out."""

    exhausted: Literal["repeat", "end"] = "repeat"
    """At its end a source begins anew in another order; "end": the job is over, and saved, once all are read."""

    sources: tuple[DataSource, ...] = ()
    """A mixture: tables [[data.sources]] with the keys below, in place of training.dataset."""
