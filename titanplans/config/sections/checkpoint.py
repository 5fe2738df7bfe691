"""Saving and loading: [checkpoint]."""

from typing import Annotated, Literal

from annotated_types import Ge

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import Constraint, FilePath, PositiveInt

KeepLatest = Annotated[
    int,
    Constraint("0 or at least 2 (the newest may be half written)", lambda value: value == 0 or value >= 2),
]
LoadStep = Annotated[int, Ge(-1)]


class Checkpoint(Options, section="checkpoint", refuses=groups.checkpoint):
    """Distributed checkpoints, in folders step-N. If the job's folder has checkpoints, the job resumes from the newest."""

    enable: bool = False
    """Save and load checkpoints."""

    folder: FilePath = "checkpoint"
    """Folder of the checkpoints, relative to dump_folder."""

    interval: PositiveInt = 500
    """Steps from one checkpoint to the next; the last step is always saved."""

    initial_load_path: FilePath | None = None
    """Checkpoint to start from if the job's folder holds no checkpoint: a folder step-N; or, under initial_load_in_hf, a
    Hugging Face folder or a repository of the Hugging Face Hub, as in hf_assets_path."""

    initial_load_in_hf: bool = False
    """Start from a Hugging Face folder or repository, with its config and tokenizer. initial_load_path names it or, if
    unset, model.hf_assets_path."""

    initial_load_model_only: bool = True
    """Load only the weights of initial_load_path, and begin at step 1; false: load its training state, too, and continue
    at its step."""

    initial_adapter_path: FilePath | None = None
    """With lora.rank: adapters to start from (a folder that peft saved) if the job's folder holds no checkpoint."""

    save_adapters_only: bool = False
    """With lora.rank: save only the weights that train; a resumed job loads all other weights from initial_load_path
    again."""

    last_save_model_only: bool = True
    """Save only the weights at the last step. This checkpoint is smaller, but training can't resume from it."""

    last_save_in_hf: bool = False
    """Save the last step as a Hugging Face folder, which from_pretrained loads; adapters are merged into the weights, and
    also saved in adapter/."""

    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type in which the last step's weights are saved, under last_save_model_only."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Save while training goes on: in a thread ("async"), or in a process that gets the state in page-locked memory
    ("async_with_pinned_mem", CUDA)."""

    keep_latest_k: KeepLatest = 10
    """Number of newest checkpoints to keep; 0: all."""

    load_step: LoadStep = -1
    """Step to load. Without load_only it must be the newest step, so that no later checkpoint is overwritten. -1: the
    newest step that training can resume from."""

    exclude_from_loading: tuple[Literal["optimizer", "lr_scheduler", "dataloader", "train_state"], ...] = ()
    """Training states that are not loaded, e.g. "optimizer"."""

    enable_first_step_checkpoint: bool = False
    """Save after step 1, too, to see at once whether saving works."""

    create_seed_checkpoint: bool = False
    """Save the initial weights as step-0, on one process, and stop."""

    save_on_signal: bool = False
    """At SIGTERM, save after two more steps at most, and end with exit status 0; any further signal ends the job at once."""

    load_only: bool = False
    """Load checkpoints, but never save."""
