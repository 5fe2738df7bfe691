"""The model, and how it is trained and validated: [model], [training], [validation]."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.sections.data import Chat, Corpus, DataLoader
from titanplans.config.sections.parallelism import Autocast, MixedPrecision, Offload
from titanplans.config.sections.weights import Freezing
from titanplans.config.values import (
    Constraint,
    FilePath,
    Name,
    NormLimit,
    PositiveInt,
    PositiveOrAuto,
)


def _is_plan(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(style, str) or _is_object(style) for style in value.values())
    return bool(value.strip()) if isinstance(value, str) else _is_object(value)


def _is_object(value: Any) -> bool:
    return not isinstance(value, bool | int | float | str | tuple | Mapping)


class PlanOption(Options):
    """Which tensor-parallel plan splits the model."""

    plan: (
        Annotated[
            Any,
            Constraint(
                'a name, "module:Class", a TPPlan class, or a table of module names and styles', _is_plan
            ),
        ]
        | None
    ) = None
    """Plan that splits the model: a registered name; "module:name" of a class, of a dict, or of a function that returns a
    dict; or a table of module names and styles. Unset: the plan that is registered for the model's architecture."""

    derive: bool = False
    """If no plan is named or registered, use a plan that titanplans derive has proved for a model of this structure. If no
    such plan is kept, a job derives one when it starts; in your own loop the model is refused."""


class Model(PlanOption, section="model", refuses=groups.model):
    """The model: a name and a flavor, a config.json, or a class of your own."""

    name: Name | None = None
    """Architecture, such as "gla" or "transformer"; unset: "gla", if neither config nor a Hugging Face folder names the
    model."""

    flavor: Name | None = None
    """Size, such as "debug" or "1.3B"; unset: "debug", if neither config nor a Hugging Face folder names the model."""

    config: FilePath | None = None
    """Path of a Hugging Face config.json, FLA's model types included, or a repository of the Hugging Face Hub, as in
    hf_assets_path; instead of name and flavor."""

    config_overrides: dict[str, Any] | None = None
    """Fields of the model's config to change: lengths, rope and dropout. A nested table changes only the keys that it
    names."""

    class_: Name | None = Field(None, alias="class")
    """A model of your own, "module:Class": any nn.Module, even if it is no class of transformers; instead of name and
    flavor."""

    arguments: dict[str, bool | int | float | str] | None = None
    """Keyword arguments of the constructor of `class`."""

    hf_assets_path: FilePath | None = None
    """Folder with the tokenizer.json, or a repository of the Hugging Face Hub ("owner/name" or "owner/name@revision"), which
    is downloaded if no such folder exists; unset: the folder of initial_load_in_hf, or titanplans' own small tokenizer."""


class Batches(Corpus):
    """The data, and the size of a step."""

    local_batch_size: PositiveInt = 8
    """Sequences that one data-parallel rank processes at a time."""

    global_batch_size: PositiveOrAuto = -1
    """Sequences in one optimizer step, over all ranks. Gradients are accumulated if this is more than one local batch per
    data-parallel rank. -1: gradient_accumulation_steps determines the number."""

    gradient_accumulation_steps: PositiveInt = 1
    """Under global_batch_size = -1: local batches that each data-parallel rank accumulates in one optimizer step."""

    seq_len: PositiveInt = 2048
    """Tokens in a sequence."""

    max_norm: NormLimit = 1.0
    """Largest 2-norm of the gradient: a gradient with a larger norm is scaled down to it. 0: the norm is only measured."""

    skip_nan_inf: bool = False
    """Skip a step whose gradient is not finite. false: a loss or gradient that is not finite ends the job."""

    skip_nan_inf_limit: PositiveInt = 20
    """Under skip_nan_inf: number of consecutive skipped steps after which the job ends."""

    steps: PositiveInt = 10000
    """Total number of optimizer steps, including the steps before a job was resumed."""

    epochs: PositiveInt | None = None
    """Passes over the data after which the job ends, unless training.steps ends it earlier; unset: only training.steps
    ends it."""


class Training(
    Freezing, MixedPrecision, Autocast, Offload, Batches, section="training", refuses=groups.training
):
    """[training]: data, batch, steps and precision."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type in which parameters, gradients and optimizer states are kept."""

    gc_freq: PositiveInt = 50
    """Steps between two garbage collections of Python; all ranks collect in the same step."""

    gc_debug: bool = False
    """Collect garbage at every step, and report reference cycles that hold tensors; slow."""

    dataloader: DataLoader = DataLoader()

    chat: Chat = Chat()


class Validation(Options, section="validation"):
    """The loss on held-out text during training."""

    enable: bool = False
    """Validate at step 1, every freq steps, and at the last step."""

    dataset: Name | None = None
    """Like training.dataset; unset: the data set, path and text column of training."""

    dataset_path: FilePath | None = None
    """Like training.dataset_path; unset: training's path, if validation.dataset is unset, too."""

    dataset_split: Name = "validation"
    """Like training.dataset_split."""

    text_column: Name | None = None
    """Like training.text_column; unset: training's column."""

    local_batch_size: PositiveInt | None = None
    """Sequences that one data-parallel rank validates at a time; unset: training.local_batch_size."""

    seq_len: PositiveInt | None = None
    """Tokens in a sequence; unset: training.seq_len."""

    freq: PositiveInt = 10
    """Training steps from one validation to the next."""

    steps: PositiveOrAuto = -1
    """Batches per validation; -1: the whole split, once."""

    unshard: bool = False
    """Gather FSDP2's weights once for all batches of a validation; each rank then holds full weights."""

    dataloader: DataLoader = DataLoader()
