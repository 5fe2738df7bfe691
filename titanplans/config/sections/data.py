"""The data: [data], [[data.sources]], [training.dataloader], [training.chat]."""

from typing import Literal

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import FilePath, Name, NaturalFloat, NaturalInt, PositiveInt


class DataLoader(Options, section="dataloader"):
    """Worker processes that prepare the batches."""

    num_workers: NaturalInt = 0
    """Worker processes per rank; 0: the training process reads the data itself."""

    persistent_workers: bool = False
    """Keep the workers alive from one epoch to the next; needs num_workers above 0."""

    pin_memory: bool = False
    """Return batches in page-locked memory, from which a copy to a GPU is faster."""

    prefetch_factor: PositiveInt | None = None
    """Batches that each worker prepares in advance; needs num_workers above 0; unset: torch's choice."""


class Chat(
    Options, section="training.chat", of_bool={True: {"enable": True}, False: {}}, refuses=groups.chat
):
    """Conversations instead of text, in training and validation.

    A chat template writes them out, and by default only the assistant's answers count in the loss.
    """

    enable: bool = False
    """Read conversations instead of text: rows of messages, or of a prompt and its completion."""

    format: Literal["messages", "sharegpt", "alpaca"] = "messages"
    """Default names of columns and keys, for options below that are unset: "messages", "sharegpt" (conversations, from,
    value) or "alpaca"."""

    messages_column: Name | None = None
    """Column or field with a list of messages; unset: "messages", or "conversations" under format = "sharegpt"."""

    role_key: Name | None = None
    """Key of a message's role; unset: "role", or "from" under format = "sharegpt"."""

    content_key: Name | None = None
    """Key of a message's text; unset: "content", or "value" under format = "sharegpt"."""

    roles: dict[str, Name] | None = None
    """The chat template's role for each role in the data; other roles are refused. Under format = "sharegpt" this table
    extends the table of that format."""

    prompt_column: Name | None = None
    """Column or field with the prompt (a string or a list of messages), for rows without a list of messages; unset: "prompt"
    or "instruction"."""

    input_column: Name | None = None
    """Column or field with a string that is appended to the prompt if it is not empty; unset: none, or "input" under
    format = "alpaca"."""

    completion_column: Name | None = None
    """Column or field with the assistant's answer to the prompt (a string or a list of messages); unset: "completion" or
    "output"."""

    system_column: Name | None = None
    """Column or field with the system message; unset: none, or "system" under format = "sharegpt" and "alpaca", if it
    exists."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens in the loss: the assistant's answers ("assistant"), its last answer ("last"), or every token ("all")."""

    chat_template: FilePath | None = None
    """Jinja file with the chat template; unset: the tokenizer's own."""

    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables of the template, such as enable_thinking or date_string."""

    truncation: Literal["drop", "left", "right", "error"] = "drop"
    """What to do with a conversation longer than seq_len: leave it out ("drop"), truncate it on the "left" or "right", or
    end the job ("error")."""

    packing: bool = True
    """Pack several complete conversations into a sequence; they do not attend to each other. false: one conversation per
    sequence, padded."""


class SourceChat(
    Chat, section="data.sources.chat", of_bool={True: {"enable": True}, False: {}}, refuses=groups.chat
):
    """Like [training.chat], for one source."""


class Corpus(Options):
    """Where text or conversations are."""

    dataset: Name = "stdlib"
    """"stdlib" (Python's standard library), "local", or a Hugging Face name ("owner/name:config"), which is streamed."""

    dataset_path: FilePath | None = None
    """File, folder or glob of .txt, .jsonl or .parquet files; with a Hugging Face name, a local copy of that data set."""

    dataset_split: Name = "train"
    """Split of the data set: "train", "validation" or "all"; for a Hugging Face name, one of that data set's splits."""

    text_column: Name = "text"
    """Column or field that holds the text, in a data set with columns; "content.body" is a nested field."""


class DataSource(Corpus, section="data.sources", refuses=groups.source):
    """A source of a mixture: a table [[data.sources]]."""

    name: Name | None = None
    """Name of the source in metrics, messages and checkpoints; unset: its path, or its data set."""

    weight: NaturalFloat = 1.0
    """Fraction of the sequences, relative to the weights of the other sources; 0: none. The weight may be changed when a
    job is resumed."""

    chat: SourceChat = SourceChat()
    """The keys of [training.chat], for this source."""

    @property
    def title(self) -> str:
        """The name; if it is unset, the path or the data set."""
        return self.name or self.dataset_path or self.dataset


class Data(Options, section="data", refuses=groups.data):
    """How documents become sequences of seq_len tokens, and the sources of the documents."""

    documents: Literal["apart", "joined"] | None = None
    """Whether tokens see tokens of other documents in their sequence: no ("apart") or yes ("joined"); unset: "apart" if
    the model supports it, else "joined"."""

    packing: Literal["cut", "best_fit"] = "cut"
    """How documents become sequences: concatenate them and cut after every seq_len tokens ("cut"), or put each complete
    document into the sequence where it fits best, and pad the rest ("best_fit")."""

    long_documents: Literal["cut", "drop"] = "cut"
    """Under packing = "best_fit": a document longer than a sequence is cut ("cut") or left out ("drop")."""

    exhausted: Literal["repeat", "end"] = "repeat"
    """What to do when all documents of a source have been read: read them again in another order ("repeat"), or end the
    job when all sources have been read ("end")."""

    sources: tuple[DataSource, ...] = ()
    """A mixture: tables [[data.sources]] with the keys below, in place of training.dataset."""
