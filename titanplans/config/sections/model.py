"""The model and its data: [model], [training], [training.dataloader], [training.chat], [validation]."""

from typing import Annotated, Any, Literal

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.paths import FilePath
from titanplans.config.sections.lora import Freezing
from titanplans.config.sections.parallelism import Autocast, MixedPrecision, Offload
from titanplans.config.values import (
    Name,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    PositiveOrAuto,
    PythonObject,
)


class PlanOption(Options):
    """Which tensor-parallel plan splits the model."""

    plan: (
        dict[str, str | Annotated[Any, PythonObject("a ParallelStyle")]]
        | Name
        | Annotated[Any, PythonObject("a TPPlan class")]
        | None
    ) = None
    """Its tensor-parallel plan: a registered name, "module:Class", or a table of module names and styles; unset: its own."""


class Model(PlanOption, section="model", refuses=groups.model):
    """The model: a name and a flavor, a config.json, or a class of your own."""

    name: Name | None = None
    """Architecture, such as "gla" or "transformer"; unset, and no config or Hugging Face folder: "gla"."""

    flavor: Name | None = None
    """Size, such as "debug" or "1.3B"; unset, and no config or Hugging Face folder: "debug"."""

    config: FilePath | None = None
    """Path of a Hugging Face config.json, FLA's model types included; instead of name and flavor."""

    class_: Name | None = None
    """A model of your own, "module:Class", an nn.Module that transformers need not know; instead of name and flavor."""

    arguments: dict[str, bool | int | float | str] | None = None
    """Keywords of its constructor."""

    hf_assets_path: FilePath | None = None
    """Folder with the tokenizer.json; unset: the folder of initial_load_in_hf, or titanplans' own small tokenizer."""


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


class Batches(Options):
    """The data, and the size of a step."""

    dataset: Name = "stdlib"
    """"stdlib" (Python's standard library), "local", or a Hugging Face name ("owner/name:config"), which is streamed."""

    dataset_path: FilePath | None = None
    """File, folder or glob of .txt, .jsonl or .parquet files; with a Hugging Face name, a local copy of it."""

    dataset_split: Name = "train"
    """Part of the data set: "train", "validation" or "all"; for a Hugging Face name, one of its own splits."""

    text_column: Name = "text"
    """Column or field that holds the text, in a data set that has such."""

    local_batch_size: PositiveInt = 8
    """Sequences that one data-parallel rank processes at a time."""

    global_batch_size: PositiveOrAuto = -1
    """Sequences in one optimizer step, over all ranks; what exceeds a local batch is accumulated. -1: see the next key."""

    gradient_accumulation_steps: PositiveInt = 1
    """Under global_batch_size = -1: local batches that each data-parallel rank accumulates for one optimizer step."""

    seq_len: PositiveInt = 2048
    """Tokens in a sequence."""

    max_norm: PositiveFloat = 1.0
    """Norm to which the gradient is clipped."""

    skip_nan_inf: bool = False
    """Leave a step out whose gradient is not finite, and go on; otherwise a loss that is not finite ends the run."""

    skip_nan_inf_limit: PositiveInt = 20
    """Steps in a row that skip_nan_inf leaves out before it ends the run."""

    steps: PositiveInt = 10000
    """Optimizer steps, in all, a resumed run's earlier ones included."""


class Training(
    Freezing, MixedPrecision, Autocast, Offload, Batches, section="training", refuses=groups.training
):
    """[training]: data, batch, steps and precision."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of the parameters, gradients and optimizer states that are kept."""

    gc_freq: PositiveInt = 50
    """Steps between two collections of Python's garbage, made on all ranks together."""

    gc_debug: bool = False
    """Collect at every step and look for reference cycles that hold tensors; slow."""

    dataloader: DataLoader = DataLoader()

    chat: Chat = Chat()


class Validation(Options, section="validation"):
    """The loss on held-out text during training."""

    enable: bool = False
    """Validate at step 1 and every freq steps."""

    dataset: Name | None = None
    """As training.dataset; unset: the same data set, path and text column."""

    dataset_path: FilePath | None = None
    """As training.dataset_path; unset, and no dataset given: the training path."""

    dataset_split: Name = "validation"
    """As training.dataset_split."""

    text_column: Name | None = None
    """As training.text_column; unset: the training column."""

    local_batch_size: PositiveInt | None = None
    """Sequences at a time on one data-parallel rank; unset: as in training."""

    seq_len: PositiveInt | None = None
    """Tokens in a sequence; unset: as in training."""

    freq: PositiveInt = 10
    """Training steps from one validation to the next."""

    steps: PositiveOrAuto = -1
    """Batches a validation; -1: the whole split, once (only where every data-parallel rank has equally many)."""

    unshard: bool = False
    """Let FSDP2 gather the weights once for all batches of a validation: a whole copy of them a process."""

    dataloader: DataLoader = DataLoader()
