"""`CheckpointManager` saves and loads a job's state with torch's distributed checkpoints. Start at `save` and `load`.

`resume.py` decides which checkpoint is loaded. `folder.py` renames a checkpoint once it is complete.
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
from titanplans.parallel.record import record_of
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.split.objects import broadcast_object, gather_objects
from titanplans.text import counted, some
from titanplans.torchrun import restarted
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.hf_folder import ADAPTER, save_hf_folder
from titanplans.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    chat_templates_of,
    damage,
    describe_changes,
    read_manifest,
)
from titanplans.training.checkpoint.match import compared_fields, job_values, parameters_with_state
from titanplans.training.checkpoint.multi_token import FILE, MultiTokenLayers, find_layers
from titanplans.training.checkpoint.resume import FOLDER_OPTION, Resume, decide_resume
from titanplans.training.checkpoint.storage import CheckpointReader, CheckpointWriter, Planner, cause_of
from titanplans.training.job import resolve
from titanplans.weights.adapters import load_adapter, trained_names
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.files import refuse_full
from titanplans.weights.load import load_weights
from titanplans.weights.merged import full_tensors
from titanplans.weights.save import check_names

OPTIMIZER = "optimizer"

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and loads a job's model and training state. Its methods are collective.

    A checkpoint holds the model's tensors by name and, if training can be resumed from it, all of `states`.

    Args:
        job: the job, which has been checked. With checkpoint.enable = false, nothing is saved or loaded.
        models: the model, or this rank's stages of a pipeline.
        states: "optimizer", "lr_scheduler", "dataloader" and "train_state", each with `state_dict` and `load_state_dict`.
        hf_config: the config of the unsplit model.
        is_finite: returns whether losses, norms and weights are finite on all ranks; called before each save.
        pipeline: the process group of the pipeline ranks; None without a pipeline.
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
        self.path = folder.checkpoint_folder(job)
        self._saves = self.options.enable and not self.options.load_only
        self._saved_step: int | None = None
        self._job_values, self._hf_config = job_values(job), hf_config
        applied = record_of(models[0]).plan
        self._plan_origin = None if applied is None else applied.plan.origin
        # Background saves need their own process group, since their thread must not use the training loop's group.
        is_async = self._saves and self.options.async_mode != "disabled"
        self._group = dist.new_group(backend="gloo") if is_async else None
        self._saving: Future | None = None
        self._staging: Future | None = None
        self._stager: DefaultStager | None = None
        # The thread of this executor starts when the first old checkpoint is removed.
        self._remover = ThreadPoolExecutor(1)
        self._chat_template: str | None = None
        self._layers: MultiTokenLayers | None = None  # on rank 0
        if not self._saves:
            return
        if dist.get_rank() == 0:
            folder.tidy(self.path)
        if self.options.last_save_in_hf:
            # Parameter names that can't be exported are refused now, before training. The chat template is read now, since
            # its file may change while the job runs.
            check_names(modeling.build(self._hf_config), full_tensors(models, pipeline))
            # There is at most one chat template, since jobs with several have been refused.
            template = next(iter(chat_templates_of(self._job_values)), None)
            self._chat_template = template and Path(template).read_text(encoding="utf-8")

    # Saving.

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Save `step` if a save is due.

        Raises:
            Diverged: a loss, a gradient norm or a weight since the last save was not finite.
            NotSaved: this checkpoint can't be written, or an earlier one could not be written in the background, e.g.
                because the disk is full.
        """
        options = self.options
        is_first = options.enable_first_step_checkpoint and step == 1
        if self._saves and (is_last or is_first or step % options.interval == 0):
            self._save(step, is_last=is_last)

    def save_now(self, step: int) -> None:
        """Save `step` with the training state, whether or not a save is due, unless it has been saved.

        Raises:
            Diverged, NotSaved: like `save`.
        """
        if self._saves and self._saved_step != step:
            self._save(step, is_last=False)

    @torch.no_grad()
    def _save(self, step: int, *, is_last: bool) -> None:
        if not self.is_finite():
            raise Diverged(
                f"step {step} is not saved: since the last checkpoint a loss, a gradient norm or a weight was not "
                f"finite; {self.resume_point()}. Start the job again with a lower optimizer.lr or more "
                "lr_scheduler.warmup_steps"
            )
        self.wait_for_saving()
        began = time.monotonic()
        if is_last and self.options.last_save_in_hf:
            self._save_hf_folder(step)
        elif is_last and self.options.last_save_model_only:
            self._write(step, self._exported_weights(), "weights", "disabled")
        else:
            state = {**self._weights(), **self.states}
            self._write(step, state, "training", "disabled" if is_last else self.options.async_mode)
        self._saved_step = step
        self._remove_stale()
        state_text = "is saved" if self._saving is None else "is copied, and written while training goes on"
        _log.info(f"step-{step} {state_text} ({time.monotonic() - began:.2f} s)")

    def _write(
        self,
        step: int,
        state: dict[str, Any],
        holds: Literal["weights", "training"],
        mode: Literal["disabled", "async", "async_with_pinned_mem"],
    ) -> None:
        """Write `state` as a distributed checkpoint; `mode` is a value of checkpoint.async_mode."""
        if self.options.save_adapters_only:
            state = keep_tensors(
                state, names={name for model in self.models for name in trained_names(model)}
            )
        manifest = self._manifest(step, holds)
        layers = None if self.options.save_adapters_only else self._newest_layers()
        writer = CheckpointWriter(folder.checkpoint_path(self.path, step), manifest, layers)
        self._refuse_full(state)
        # An asynchronous save leaves its copies of the state in reference cycles. In the training loop automatic garbage
        # collection is off, and the loop's own collections visit only young objects. These copies are old when they have
        # been written, so they are collected here.
        gc.collect()
        with self._raise_one_line(f"step {step} can't be saved in {self.path}"):
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

    def _newest_layers(self) -> MultiTokenLayers | None:
        """Return, on rank 0, the layers of multi-token prediction in the job's newest checkpoint."""
        # The checkpoint from which the layers were loaded may have been removed since then.
        if self._layers is not None and (steps := folder.steps(self.path)):
            newest = folder.checkpoint_path(self.path, steps[-1])
            if (newest / FILE).is_file():
                self._layers = self._layers._replace(source=newest)
        return self._layers

    def _manifest(self, step: int, holds: Literal["weights", "training"]) -> Manifest:
        return Manifest(
            step, holds, compared_fields(self._hf_config), self._job_values, {}, self._plan_origin
        )

    def _weights(self) -> dict[str, Any]:
        return {name: value for model in self.models for name, value in model.state_dict().items()}

    def _exported_weights(self) -> dict[str, Any]:
        """Return the weights in checkpoint.export_dtype, except those that must stay in float32."""
        dtype = getattr(torch, self.options.export_dtype)
        stay_float32 = [keeps_float32(model, dtype) for model in self.models]

        def cast(name: str, value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if is_float and not any(stays(name) for stays in stay_float32) else value

        return {name: cast(name, value) for name, value in self._weights().items()}

    def _save_hf_folder(self, step: int) -> None:
        checkpoint = folder.checkpoint_path(self.path, step)
        try:
            save_hf_folder(
                self.models,
                checkpoint,
                self._manifest(step, "weights"),
                config=self._hf_config,
                tokenizer=resolve.tokenizer_path(self.job),
                chat_template=self._chat_template,
                dtype=getattr(torch, self.options.export_dtype),
                group=self._pipeline,
                layers=self._newest_layers(),
            )
        except NotSaved as error:
            if dist.get_rank() == 0:
                folder.tidy(self.path, ["writing"])
            raise NotSaved(
                f"step {step} can't be saved in {self.path}: {error}; {self.resume_point()}"
            ) from error
        note = ""
        if self._job_values.get("lora.quantize_base") is not None:
            note = (
                "; adapters were merged into base weights rounded to NF4; to merge them into the unrounded weights, "
                f"export {ADAPTER}/"
            )
        _log.info(f"{checkpoint} is a Hugging Face folder, in {self.options.export_dtype}{note}")

    def _remove_stale(self) -> None:
        """Remove all but the newest `keep_latest_k` checkpoints; another thread deletes their files."""
        keep = self.options.keep_latest_k
        if keep and dist.get_rank() == 0:
            for step in folder.steps(self.path)[:-keep]:
                removed = folder.remove(folder.checkpoint_path(self.path, step))
                # Errors are ignored: `folder.tidy` deletes what is left when the job starts again.
                self._remover.submit(shutil.rmtree, removed, ignore_errors=True)

    def _refuse_full(self, state: dict[str, Any]) -> None:
        """Raise `NotSaved` before anything is written if the disk has no room for `state`."""
        tensors = state | (state[OPTIMIZER].state_dict() if OPTIMIZER in state else {})
        needed = sum(value.nbytes for value in tensors.values() if isinstance(value, torch.Tensor))
        if self._pipeline is not None:
            needed = sum(gather_objects(needed, self._pipeline))
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            on_first_rank(lambda: refuse_full(self.path, needed), self.path)
        except NotSaved as error:
            raise NotSaved(f"{error}; {self.resume_point()}") from None

    def wait_for_staging(self) -> None:
        """Wait until an asynchronous save has copied the state. Call this before the optimizer's step changes the state."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def wait_for_saving(self) -> None:
        """Wait until an asynchronous save is complete.

        Raises:
            NotSaved: the disk is full, or refuses to write.
        """
        if self._saving is not None:
            with self._raise_one_line(f"a checkpoint can't be saved in {self.path}"):
                self._saving.result()
            self._saving = None

    def resume_point(self) -> str:
        """Wait for pending writes; return a phrase that names the newest checkpoint."""
        self.wait_for_saving()
        return folder.describe_newest(self.path)

    def close(self) -> None:
        """Wait for pending writes, and end the threads."""
        self.wait_for_saving()
        self._remover.shutdown()
        if self._stager is not None:
            self._stager.close()

    # Loading.

    @torch.no_grad()
    def load(self) -> None:
        """Load the checkpoint that `decide_resume` chooses; if it chooses none, the randomly initialised weights are kept.

        Raises:
            ConfigError: a file of the checkpoint is damaged.
        """
        # Rank 0 decides for all ranks: on a shared file system other ranks may see an outdated folder.
        resume = None
        if dist.get_rank() == 0:
            resume = decide_resume(self.job, self.path, restarted=restarted(os.environ))
        resume = cast(Resume, broadcast_object(resume))
        is_own = resume.key == FOLDER_OPTION
        if resume.source is None:
            _log.info("nothing is loaded: training starts from randomly initialised weights")
        else:
            began = time.monotonic()
            if is_own:
                self._log_repeated_steps(resume.source)
            if resume.contents == "weights":
                self.load_weights(resume.source)
            else:
                self._load_training(resume.source)
            if self._saves and dist.get_rank() == 0:
                source = self._base_weights() if is_own and self.options.save_adapters_only else resume.source
                self._layers = find_layers(source, modeling.build(self._hf_config))
                if self._layers is not None:
                    _log.info(f"{self._layers.describe()}: checkpoints and exported folders have them")
            gc.collect()  # automatic collection is off in the training loop
            _log.info(f"{resume.source} is loaded ({time.monotonic() - began:.2f} s)")
        if not is_own and (adapter := self.options.initial_adapter_path) is not None:
            for model in self.models:
                load_adapter(model, adapter)
            _log.info(f"the adapters are loaded from {adapter}")

    def load_weights(self, source: Path) -> int:
        """Load only the weights of a folder step-N or a Hugging Face folder; return its step, or 0 if it has no manifest.

        Raises:
            ConfigError: a file of the folder is damaged.
        """
        self._refuse_damaged(source)
        if (source / ".metadata").is_file():
            self._load_distributed(source, self._weights())
        else:
            for model in self.models:
                load_weights(model, source, seed=torch.initial_seed())
        return read_manifest(source).step if (source / MANIFEST).is_file() else 0

    def _load_training(self, checkpoint: Path) -> None:
        self._refuse_damaged(checkpoint)
        is_own = checkpoint.parent == self.path
        if is_own and (changes := describe_changes(read_manifest(checkpoint).job, self._job_values)):
            _log.info(
                f"{checkpoint.name} was saved by a job with other values; the values of this job are used: {changes}"
            )
        excluded = self.options.exclude_from_loading
        states = {name: state for name, state in self.states.items() if name not in excluded}
        self._load_distributed(checkpoint, {**self._weights(), **states})

    def _load_distributed(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Load `state` from a distributed checkpoint; with save_adapters_only, load the base weights first."""
        if self.options.save_adapters_only and checkpoint.parent == self.path:
            _log.info(f"the base weights are loaded from {self._base_weights()}")
            self.load_weights(self._base_weights())
        with self._raise_one_line(f"{checkpoint} can't be loaded"):
            reader = CheckpointReader(checkpoint)
            saved = reader.read_metadata().state_dict_metadata
            if any(map(adapted, self.models)):
                # A checkpoint may hold only the adapters, or only the base weights. Load the tensors that it has:
                # `check_saved` has refused checkpoints that lack any others.
                state = keep_tensors(state, names=saved)
            if OPTIMIZER in state:
                state = state | {
                    OPTIMIZER: SavedOptimizerState(state[OPTIMIZER], parameters_with_state(saved))
                }
            dcp.load(state, storage_reader=reader, planner=Planner())
        for model in self.models:
            # Not strict: `state` also holds tensors of this rank's other stages, and states that are not weights.
            model.load_state_dict(state, strict=False)

    def _base_weights(self) -> Path:
        """Return the folder of the base weights of a job that saves only its adapters."""
        return Path(str(resolve.hf_weights_folder(self.job) or self.options.initial_load_path))

    def _refuse_damaged(self, checkpoint: Path) -> None:
        if not (checkpoint / MANIFEST).is_file():  # another program's checkpoint, without checksums
            return
        if (fault := _damage_on_any_rank(checkpoint)) is not None:
            is_own = checkpoint.parent == self.path
            remedy = folder.remedy(checkpoint, _damage_on_any_rank) if is_own else "take another checkpoint"
            raise ConfigError(f"{fault}; {remedy}")

    def _log_repeated_steps(self, checkpoint: Path) -> None:
        last = folder.steps(self.path)[-1]
        if self.options.load_step == -1 and checkpoint.name != f"step-{last}":
            _log.info(
                f"the job resumes from {checkpoint.name} and repeats the steps up to {last}: step-{last} holds only "
                "the weights; checkpoint.last_save_model_only = false saves the training state with the last step, too"
            )

    @contextmanager
    def _raise_one_line(self, what: str) -> Iterator[None]:
        """Replace torch's CheckpointException by an error of one line, which begins with `what`.

        torch raises a CheckpointException on all ranks if one rank has failed.
        """
        try:
            yield
        except CheckpointException as failed:
            self._saving = None
            if dist.get_rank() == 0:
                folder.tidy(self.path, ["writing"])  # all ranks have stopped writing
            cause = cause_of(failed)
            if isinstance(cause, UserError):
                raise cause from None
            if isinstance(cause, OSError):
                raise NotSaved(f"{what} ({disk.reason(cause)}); {self.resume_point()}") from failed
            raise RuntimeError(f"{what}: {type(cause).__name__}: {cause}") from failed


class SavedOptimizerState:
    """Loads the optimizer states that a checkpoint has. Parameters without a saved state begin with a new one.

    Parameters that had no gradient before the save, e.g. those of a vision tower after text-only batches, have no state in
    the checkpoint.

    Args:
        optimizers: the job's `Optimizers`.
        parameters: names of the parameters that have a state in the checkpoint.
    """

    def __init__(self, optimizers: Any, parameters: Collection[str]):
        self._optimizers, self._parameters = optimizers, parameters

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' state, into which a checkpoint is loaded. Parameters that the checkpoint lacks are left
        out."""
        state = self._optimizers.state_dict()
        parameter_of = {
            key: key.removeprefix("state.").rpartition(".")[0] for key in state if key.startswith("state.")
        }
        if missing := {name: None for name in parameter_of.values() if name not in self._parameters}:
            _log.info(
                f"{counted(len(missing), 'parameter')} had no gradient yet and no optimizer state ({some([*missing])})"
            )
        return {key: value for key, value in state.items() if parameter_of.get(key) not in missing}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict`; parameters that it lacks begin with a new state."""
        self._optimizers.load_state_dict(state_dict)


def keep_tensors(state: dict[str, Any], *, names: Collection[str]) -> dict[str, Any]:
    """Return `state` without the tensors that are not in `names`; values that are not tensors are kept."""
    return {
        name: value for name, value in state.items() if name in names or not isinstance(value, torch.Tensor)
    }


def _damage_on_any_rank(checkpoint: Path) -> str | None:
    """Return the result of `damage` for a checkpoint whose files are distributed over the ranks. Collective."""
    faults = gather_objects(damage(checkpoint, dist.get_rank(), dist.get_world_size()))
    return next((fault for fault in faults if fault is not None), None)
