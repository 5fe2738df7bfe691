"""Saving and loading what a job trains, by torch's distributed checkpoints: whole or not at all, and checked.

Start at `save` and `load`. What is loaded is decided in `resume.py`; `folder.py` says how a checkpoint comes into its place.
"""

import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from transformers import PretrainedConfig, PreTrainedModel

from titanplans import disk, modeling
from titanplans.adapters.low_rank import adapted
from titanplans.config import JobConfig
from titanplans.errors import ConfigError, Diverged, NotSaved, UserError
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.split.objects import from_first, of_all
from titanplans.text import counted, some
from titanplans.torchrun import restarted
from titanplans.training.checkpoint import folder, published
from titanplans.training.checkpoint.card import CARD, Card, changes, chat_templates_of, damage, read_card
from titanplans.training.checkpoint.match import job_values, model_card, with_state
from titanplans.training.checkpoint.resume import OWN, Resume, decide_resume
from titanplans.training.checkpoint.storage import CheckpointReader, CheckpointWriter, Planner, cause_of
from titanplans.training.job import resolve
from titanplans.weights.adapters import load_adapter, trained_names
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.files import refuse_full
from titanplans.weights.load import load_weights
from titanplans.weights.merged import whole_tensors
from titanplans.weights.save import check_names

OPTIMIZER = "optimizer"

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and loads a job's model and training state, in the folder of its checkpoints. Its methods are collective.

    A checkpoint holds the model's tensors by name and, if training can go on from it, each of `states`.

    Args:
        job: which has been checked; with checkpoint.enable = false, nothing is saved or loaded.
        models: the model, or this rank's stages of a pipeline.
        states: "optimizer", "lr_scheduler", "dataloader" and "train_state", each with `state_dict` and `load_state_dict`.
        hf_config: the whole model's.
        is_finite: whether all numbers since its last call were finite, on all ranks; asked before each save.
        pipeline: the process group of the stages.
    """

    def __init__(
        self,
        job: JobConfig,
        models: Sequence[PreTrainedModel],
        states: Mapping[str, Any],
        *,
        hf_config: PretrainedConfig,
        is_finite: Callable[[], bool],
        pipeline: dist.ProcessGroup | None = None,
    ):
        self.job, self.options = job, job.checkpoint
        self.models, self.states, self.is_finite, self._pipeline = models, states, is_finite, pipeline
        self.path = folder.own_folder(job)
        self._saves = self.options.enable and not self.options.load_only
        self._saved_step: int | None = None
        self._values, self._hf_config = job_values(job), hf_config
        # Saves in the background meet on a group of their own: another thread must not use the training's.
        in_background = self._saves and self.options.async_mode != "disabled"
        self._group = dist.new_group(backend="gloo") if in_background else None
        self._saving: Future | None = None
        self._staging: Future | None = None
        self._stager: DefaultStager | None = None
        self._remover = ThreadPoolExecutor(1)  # its thread starts with the first checkpoint that is removed
        self._chat_template: str | None = None
        if not self._saves:
            return
        if dist.get_rank() == 0:
            folder.tidy(self.path)
        if self.options.last_save_in_hf:
            # Both are refused or read now, and not after the last step: the file may change while the job runs.
            check_names(modeling.build(self._hf_config), whole_tensors(models, pipeline))
            template = next(iter(chat_templates_of(self._values)), None)  # a job with several is refused
            self._chat_template = template and Path(template).read_text(encoding="utf-8")

    # Saving.

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Save `step` if it is due.

        Raises:
            Diverged: a loss, a gradient's norm or a weight since the last save was not finite.
            NotSaved: the disk is full, or refuses; or it did so for a save in the background.
        """
        options = self.options
        is_first = options.enable_first_step_checkpoint and step == 1
        if self._saves and (is_last or is_first or step % options.interval == 0):
            self._save(step, is_last=is_last)

    def save_now(self, step: int) -> None:
        """Save `step`, due or not, with all that training goes on from, unless that has just been done.

        Raises:
            Diverged, NotSaved: as for a save that is due.
        """
        if self._saves and self._saved_step != step:
            self._save(step, is_last=False)

    @torch.no_grad()
    def _save(self, step: int, *, is_last: bool) -> None:
        if not self.is_finite():
            raise Diverged(
                f"step {step} is not saved: since the last checkpoint a loss, a gradient's norm or a weight was not "
                f"finite; {self.resume_point()}. Start the job again with a lower optimizer.lr or more "
                "lr_scheduler.warmup_steps"
            )
        self.wait_for_saving()
        began = time.monotonic()
        if is_last and self.options.last_save_in_hf:
            self._save_published(step)
        elif is_last and self.options.last_save_model_only:
            self._write(step, self._exported_weights(), "weights", "disabled")
        else:
            state = {**self._weights(), **self.states}
            self._write(step, state, "training", "disabled" if is_last else self.options.async_mode)
        self._saved_step = step
        self._remove_stale()
        done = "is saved" if self._saving is None else "is copied, and written while training goes on"
        _log.info(f"step-{step} {done} ({time.monotonic() - began:.2f} s)")

    def _write(
        self,
        step: int,
        state: dict[str, Any],
        holds: Literal["weights", "training"],
        mode: Literal["disabled", "async", "async_with_pinned_mem"],
    ) -> None:
        """Write `state` as a distributed checkpoint, by a writer that renames complete ones."""
        if self.options.save_adapters_only:
            state = without_tensors(
                state, but={name for model in self.models for name in trained_names(model)}
            )
        card = Card(step, holds, model_card(self._hf_config), self._values, {})
        writer = CheckpointWriter(folder.checkpoint_path(self.path, step), card)
        self._refuse_full(state)
        # What an asynchronous save has copied ends up in cycles, with a mesh for each DTensor. The loop has switched off
        # Python's collections, and its own see young objects alone, which these no longer are when they are written.
        gc.collect()
        with self._failures_as_one_line(f"step {step} can't be saved in {self.path}"):
            if mode == "disabled":
                dcp.save(state, storage_writer=writer)
                return
            options: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
            if mode == "async_with_pinned_mem":
                self._stager = self._stager or DefaultStager(
                    StagingOptions(
                        use_pinned_memory=True,
                        use_shared_memory=True,
                        use_async_staging=True,
                        use_non_blocking_copy=True,
                    )
                )
                options |= {
                    "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
                    "async_stager": self._stager,
                }
            response = dcp.async_save(state, **options)
        if isinstance(response, AsyncSaveResponse):
            self._staging, self._saving = response.staging_completion, response.upload_completion
        else:
            self._saving = response

    def _weights(self) -> dict[str, Any]:
        return {name: value for model in self.models for name, value in model.state_dict().items()}

    def _exported_weights(self) -> dict[str, Any]:
        """Return the weights in checkpoint.export_dtype, but for those that stay in float32."""
        dtype = getattr(torch, self.options.export_dtype)
        keeps = [keeps_float32(model, dtype) for model in self.models]

        def cast(name: str, value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if is_float and not any(kept(name) for kept in keeps) else value

        return {name: cast(name, value) for name, value in self._weights().items()}

    def _save_published(self, step: int) -> None:
        """Write a Hugging Face folder with a card, tensor by tensor."""
        checkpoint = folder.checkpoint_path(self.path, step)
        try:
            published.save(
                self.models,
                checkpoint,
                Card(step, "weights", model_card(self._hf_config), self._values, {}),
                config=self._hf_config,
                tokenizer=resolve.tokenizer_path(self.job),
                chat_template=self._chat_template,
                dtype=getattr(torch, self.options.export_dtype),
                group=self._pipeline,
            )
        except NotSaved as error:
            if dist.get_rank() == 0:
                folder.tidy(self.path, ["writing"])
            raise NotSaved(
                f"step {step} can't be saved in {self.path}: {error}; {self.resume_point()}"
            ) from error
        rounded = ""
        if self._values.get("lora.quantize_base") is not None:
            rounded = (
                "; adapters are added to weights rounded to NF4: an export of "
                f"{published.ADAPTER}/ adds to the whole base"
            )
        _log.info(f"{checkpoint} is a Hugging Face folder, in {self.options.export_dtype}{rounded}")

    def _remove_stale(self) -> None:
        """Remove all but the newest `keep_latest_k`; their files go in another thread."""
        kept = self.options.keep_latest_k
        if kept and dist.get_rank() == 0:
            for step in folder.steps(self.path)[:-kept]:
                removed = folder.remove(folder.checkpoint_path(self.path, step))
                # What can't be removed now goes when the job starts the next time.
                self._remover.submit(shutil.rmtree, removed, ignore_errors=True)

    def _refuse_full(self, state: dict[str, Any]) -> None:
        """Refuse a save for which the disk has no room, before anything is written."""
        tensors = state | (state[OPTIMIZER].state_dict() if OPTIMIZER in state else {})
        needed = sum(value.nbytes for value in tensors.values() if isinstance(value, torch.Tensor))
        if self._pipeline is not None:
            needed = sum(of_all(needed, self._pipeline))
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            on_first_rank(lambda: refuse_full(self.path, needed), self.path)
        except NotSaved as error:
            raise NotSaved(f"{error}; {self.resume_point()}") from None

    def wait_for_staging(self) -> None:
        """Wait until a save in the background has copied the state, which the next step changes."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def wait_for_saving(self) -> None:
        """Wait until a save in the background is complete.

        Raises:
            NotSaved: the disk is full, or refuses.
        """
        if self._saving is not None:
            with self._failures_as_one_line(f"a checkpoint can't be saved in {self.path}"):
                self._saving.result()
            self._saving = None

    def resume_point(self) -> str:
        """Return from where the job can resume, in words, once pending writes are done."""
        self.wait_for_saving()
        return folder.newest(self.path)

    def close(self) -> None:
        """Wait for pending writes, and end the threads."""
        self.wait_for_saving()
        self._remover.shutdown()
        if self._stager is not None:
            self._stager.close()

    # Loading.

    @torch.no_grad()
    def load(self) -> None:
        """Load what `decide_resume` names; without it, the initial weights stay.

        Raises:
            ConfigError: a file of it is not as it was written.
        """
        # One rank looks at the folder: on a shared file system another may see it later.
        resume = None
        if dist.get_rank() == 0:
            resume = decide_resume(self.job, self.path, restarted=restarted(os.environ))
        resume = cast(Resume, from_first(resume))
        is_own = resume.key == OWN
        if resume.source is None:
            _log.info("nothing is loaded: training starts from drawn weights")
        else:
            began = time.monotonic()
            if is_own:
                self._say_what_is_repeated(resume.source)
            if resume.takes == "weights":
                self.load_weights(resume.source)
            else:
                self._load_training(resume.source)
            gc.collect()  # the loop has switched off Python's own collections
            _log.info(f"{resume.source} is loaded ({time.monotonic() - began:.2f} s)")
        if not is_own and (adapter := self.options.initial_adapter_path) is not None:
            for model in self.models:
                load_adapter(model, adapter)
            _log.info(f"the adapters are those of {adapter}")

    def load_weights(self, source: Path) -> int:
        """Load the weights alone of a step-N folder or a Hugging Face folder; return its step, 0 where no card names it.

        Raises:
            ConfigError: a file of it is not as it was written.
        """
        self._refuse_damaged(source)
        if (source / ".metadata").is_file():
            self._load_distributed(source, self._weights())
        else:
            for model in self.models:
                load_weights(model, source, seed=torch.initial_seed())
        return read_card(source).step if (source / CARD).is_file() else 0

    def _load_training(self, checkpoint: Path) -> None:
        self._refuse_damaged(checkpoint)
        is_own = checkpoint.parent == self.path
        if is_own and (differing := changes(read_card(checkpoint).job, self._values)):
            _log.info(
                f"{checkpoint.name} is of a job with other values, which this one's replace: {differing}"
            )
        excluded = self.options.exclude_from_loading
        states = {name: state for name, state in self.states.items() if name not in excluded}
        self._load_distributed(checkpoint, {**self._weights(), **states})

    def _load_distributed(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Load `state` from a distributed checkpoint; the optimizers keep the settings of this job."""
        if self.options.save_adapters_only and checkpoint.parent == self.path:
            base = resolve.hf_weights_folder(self.job) or self.options.initial_load_path
            _log.info(f"the base weights are those of {base}")
            self.load_weights(Path(str(base)))
        with self._failures_as_one_line(f"{checkpoint} can't be loaded"):
            reader = CheckpointReader(checkpoint)
            saved = reader.read_metadata().state_dict_metadata
            if any(map(adapted, self.models)):  # `check_saved` has refused a checkpoint that lacks more
                state = without_tensors(state, but=saved)
            if OPTIMIZER in state:
                state = state | {OPTIMIZER: SavedStates(state[OPTIMIZER], with_state(saved))}
            dcp.load(state, storage_reader=reader, planner=Planner())
        for model in self.models:
            # Not strict: `state` also holds the tensors of this rank's other stages, and the states that are no model's.
            model.load_state_dict(state, strict=False)

    def _refuse_damaged(self, checkpoint: Path) -> None:
        if not (checkpoint / CARD).is_file():  # another program's
            return
        if (wrong := _damage(checkpoint)) is not None:
            is_own = checkpoint.parent == self.path
            instead = folder.remedy(checkpoint, _damage) if is_own else "take another checkpoint"
            raise ConfigError(f"{wrong}; {instead}")

    def _say_what_is_repeated(self, checkpoint: Path) -> None:
        last = folder.steps(self.path)[-1]
        if self.options.load_step == -1 and checkpoint.name != f"step-{last}":
            _log.info(
                f"the job resumes from {checkpoint.name} and repeats the steps up to {last}: step-{last} holds only "
                "the weights; checkpoint.last_save_model_only = false saves the last step whole"
            )

    @contextmanager
    def _failures_as_one_line(self, what: str) -> Iterator[None]:
        """Make one line of CheckpointException, which torch raises on all ranks if some failed."""
        try:
            yield
        except CheckpointException as failed:
            self._saving = None
            if dist.get_rank() == 0:
                folder.tidy(self.path, ["writing"])  # no rank writes any more
            cause = cause_of(failed)
            if isinstance(cause, UserError):
                raise cause from None
            if isinstance(cause, OSError):
                raise NotSaved(f"{what} ({disk.reason(cause)}); {self.resume_point()}") from failed
            raise RuntimeError(f"{what}: {type(cause).__name__}: {cause}") from failed


class SavedStates:
    """The state of `optimizers` that a checkpoint has, which holds that of `parameters`.

    A parameter that had no gradient before the save, such as those of a vision tower that saw text alone, has no state in
    it. It begins with a new one, as in the run that saved.
    """

    def __init__(self, optimizers: Any, parameters: Collection[str]):
        self._optimizers, self._parameters = optimizers, parameters

    def state_dict(self) -> dict[str, Any]:
        """Return the state to load into."""
        state = self._optimizers.state_dict()
        owners = {
            key: key.removeprefix("state.").rpartition(".")[0] for key in state if key.startswith("state.")
        }
        if new := {name: None for name in owners.values() if name not in self._parameters}:
            _log.info(
                f"{counted(len(new), 'parameter')} had no gradient yet and no optimizer state ({some([*new])})"
            )
        return {key: value for key, value in state.items() if owners.get(key) not in new}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it; parameters that it lacks lose theirs."""
        self._optimizers.load_state_dict(state_dict)


def without_tensors(state: dict[str, Any], *, but: Collection[str]) -> dict[str, Any]:
    """Return a state without tensors, `but` those of these names."""
    return {
        name: value for name, value in state.items() if name in but or not isinstance(value, torch.Tensor)
    }


def _damage(checkpoint: Path) -> str | None:
    """As `titanplans.training.checkpoint.card.damage`; each rank reads a part of the files."""
    found = of_all(damage(checkpoint, dist.get_rank(), dist.get_world_size()))
    return next((words for words in found if words is not None), None)
