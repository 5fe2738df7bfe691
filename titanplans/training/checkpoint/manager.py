"""torchtitan's CheckpointManager, which saves whole checkpoints or none, and touches no others.

torchtitan decides when a checkpoint is due, its content and the thread that writes it.
"""

import gc
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.components.checkpointer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER, TRAIN_STATE
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools.logging import logger
from transformers import PretrainedConfig

from titanplans import disk, modeling
from titanplans.adapters.low_rank import adapted
from titanplans.errors import ConfigError, Diverged, NotSaved, UserError
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.split.objects import of_all
from titanplans.text import counted, some
from titanplans.training.checkpoint import folder, published
from titanplans.training.checkpoint.card import CARD, Card, damage, read_card
from titanplans.training.checkpoint.match import changes, has_gone_on_from, model_card, to_resume, with_state
from titanplans.training.checkpoint.storage import CheckpointReader, CheckpointWriter, Planner, cause_of
from titanplans.weights.adapters import load_adapter, trained_names
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.files import refuse_full
from titanplans.weights.load import load_weights
from titanplans.weights.merged import whole_tensors
from titanplans.weights.save import check_names


class CheckpointManager(torchtitan.components.checkpointer.CheckpointManager):
    """torchtitan's, with the same arguments, which loads nothing that is damaged.

    Attributes:
        finite: asked on every rank before a save: whether all numbers since the last one were finite, on all ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.components.checkpointer.CheckpointManager.Config):
        """torchtitan's, whose `build` makes this class."""

        job: dict[str, Any]
        """As `Card.job`."""

        save_on_signal: bool = False
        """At SIGTERM the trainer calls `save_now`."""

        initial_adapter_path: str | None = None
        """A folder of peft's."""

        save_adapters_only: bool = False
        """A checkpoint holds of the model what trains alone."""

        restarted: bool = False
        """A launcher has started the job again."""

        hf_config: PretrainedConfig
        """The model's, for the config.json of a Hugging Face folder."""

        tokenizer: str | None = None
        """The folder of the tokenizer, which is copied into it."""

        chat_template: str | None = None
        """Jinja by which the job writes conversations; None for the tokenizer's own."""

    def __init__(self, config: Config, *, pipeline: dist.ProcessGroup | None = None, **components: Any):
        self.config, self._pipeline = config, pipeline
        self._now = False
        self._saved: int | None = None
        self.finite: Callable[[], bool] = lambda: True
        # torchtitan wants an adapter of names, which nothing here needs.
        super().__init__(replace(config, last_save_in_hf=False), **components)
        self.last_save_in_hf = config.last_save_in_hf
        if self.enable:
            self.path = Path(self.folder)
            if not self.load_only and dist.get_rank() == 0:
                folder.tidy(self.path)
            if self.last_save_in_hf:  # refused now, not after the last step
                check_names(modeling.build(config.hf_config), whole_tensors(self._lms, self._pipeline))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if it is due.

        Raises:
            Diverged: a loss or a gradient's norm since the last save was not finite.
            NotSaved: the disk is full, or refuses.
        """
        if self._should_save(curr_step, last_step) and not self.finite():
            raise Diverged(
                f"step {curr_step} is not saved: since the last checkpoint a loss, a gradient's norm or a weight was not "
                f"finite; {self.resume_point()}. Start the job again with a lower optimizer.lr or more "
                "lr_scheduler.warmup_steps"
            )
        saved = super()._save(curr_step, last_step)
        if saved:
            self._saved = curr_step
        if saved and last_step:
            self._purge_stale_checkpoints()  # which torchtitan leaves out
        return saved

    def save_now(self, step: int) -> None:
        """Save `step`, due or not, with all that training goes on from, unless that has just been done.

        Raises:
            Diverged, NotSaved: as for a save that is due.
        """
        if self._saved == step:
            return
        self._now = True
        self.save(step)
        self._now = False

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return (self._now and self.enable and not self.load_only) or super()._should_save(
            curr_step, last_step
        )

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        """torchtitan's, by a writer that renames complete checkpoints."""
        checkpoint = Path(checkpoint_id)
        if self.config.save_adapters_only:
            trained = {name for lm in self._lms for name in trained_names(lm)}
            state_dict = without_tensors(state_dict, but=trained)
        holds = "training" if TRAIN_STATE in state_dict else "weights"
        if holds == "weights":  # torchtitan has cast them all
            keeps = [keeps_float32(lm, self.export_dtype) for lm in self._lms]
            weights = self.states[MODEL].state_dict()
            state_dict = {
                name: weights[name] if any(kept(name) for kept in keeps) else value
                for name, value in state_dict.items()
            }
        step = int(checkpoint.name.removeprefix("step-"))
        model = model_card(self.config.hf_config)
        writer = CheckpointWriter(checkpoint, Card(step, holds, model, self.config.job, {}))
        self._refuse_full(state_dict)
        # What an asynchronous save has copied ends up in cycles, with a mesh for each DTensor. torchtitan has switched
        # Python's collections off, and its own see young objects alone, which these no longer are when they are written.
        gc.collect()
        with self._failures_as_one_line(f"step {step} can't be saved in {self.path}"):
            if async_mode == AsyncMode.DISABLED:
                dcp.save(state_dict, storage_writer=writer)
                return None
            options: dict[str, Any] = {"storage_writer": writer, "process_group": self.pg}
            if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                options |= {
                    "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
                    "async_stager": self.stager,
                }
            return dcp.async_save(state_dict, **options)

    def _save_last_step(self, curr_step: int) -> None:
        """As torchtitan's; with last_save_in_hf, write a Hugging Face folder with a card, tensor by tensor."""
        if not self.last_save_in_hf:
            super()._save_last_step(curr_step)
            return
        checkpoint = folder.checkpoint_path(self.path, curr_step)
        card = Card(curr_step, "weights", model_card(self.config.hf_config), self.config.job, {})
        try:
            published.save(
                self._lms,
                checkpoint,
                card,
                config=self.config.hf_config,
                tokenizer=self.config.tokenizer,
                chat_template=self.config.chat_template,
                dtype=self.export_dtype,
                group=self._pipeline,
            )
        except NotSaved as error:
            if dist.get_rank() == 0:
                folder.tidy(self.path, ["writing"])
            raise NotSaved(
                f"step {curr_step} can't be saved in {self.path}: {error}; {self.resume_point()}"
            ) from error
        rounded = f"; adapters are added to weights rounded to NF4: an export of {published.ADAPTER}/ adds to the whole base"
        small = self.config.job.get("lora.quantize_base") is not None
        logger.info(f"{checkpoint} is a Hugging Face folder, in {self.export_dtype}{rounded * small}")

    def _wait_for_saving(self) -> None:
        with self._failures_as_one_line(f"a checkpoint can't be saved in {self.path}"):
            super()._wait_for_saving()

    def _purge_stale_checkpoints(self) -> None:
        """Remove all but the newest `keep_latest_k`, and the one that `load_step` names, which a restart needs."""
        if not self._should_purge():
            return
        stale = [step for step in folder.steps(self.path) if step != self.config.load_step]
        for step in stale[: -self.keep_latest_k]:
            self.purge_queue.put(str(folder.remove(folder.checkpoint_path(self.path, step))))

    def _refuse_full(self, state_dict: dict[str, Any]) -> None:
        """Refuse a save for which the disk has no room, before anything is written."""
        states = state_dict | (state_dict[OPTIMIZER].state_dict() if OPTIMIZER in state_dict else {})
        needed = sum(value.nbytes for value in states.values() if isinstance(value, torch.Tensor))
        if (pipeline := self._pipeline) is not None:
            needed = sum(of_all(needed, pipeline))
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            on_first_rank(lambda: refuse_full(self.path, needed), self.path)
        except NotSaved as error:
            raise NotSaved(f"{error}; {self.resume_point()}") from None

    def _load(self, step: int = -1) -> bool:
        """Load what `step` says, -1 for the newest from which training goes on; what came later is set aside.

        Raises:
            ConfigError: there is none, or a file of it is not as it was written.
        """
        step = of_all(self._step_to_load(step) if dist.get_rank() == 0 else None)[0]
        loaded = super()._load(step)
        if step == -1 and (adapter := self.config.initial_adapter_path) is not None:
            for lm in self._lms:
                load_adapter(lm, adapter)
            logger.info(f"the adapters are those of {adapter}")
        if step != -1 and not self.load_only:
            dist.barrier()  # all ranks have read before one renames
            if dist.get_rank() == 0 and (aside := folder.set_aside(self.path, later_than=step)):
                logger.info(f"checkpoints after step {step} were set aside, into {aside}")
        return loaded

    @property
    def _lms(self) -> list[Any]:
        """The model, or its stages of a pipeline that this process has."""
        return self.states[MODEL].model

    def _step_to_load(self, step: int) -> int:
        if step != -1 and not (self.config.restarted and has_gone_on_from(self.path, step)):
            return step
        if (newest := to_resume(self.path)) is None:
            return -1
        last = folder.steps(self.path)[-1]
        if newest.name != f"step-{last}":
            logger.info(
                f"the job resumes from {newest.name} and repeats the steps up to {last}: step-{last} holds only "
                "the weights; checkpoint.last_save_model_only = false saves the last step whole"
            )
        return int(newest.name.removeprefix("step-"))

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Check the files of a checkpoint and load it; the optimizers keep the settings of this job.

        A Hugging Face folder (`from_hf`) holds only weights; each rank reads its parts.
        """
        checkpoint = Path(checkpoint_id)
        if from_hf:
            for lm in self._lms:
                load_weights(lm, checkpoint, seed=torch.initial_seed())
            return
        own = checkpoint.parent == self.path
        if own and self.config.save_adapters_only:
            logger.info(f"the base weights are those of {self.initial_load_path}")
            self.dcp_load(
                self.states[MODEL].state_dict(),
                str(self.initial_load_path),
                self.initial_load_in_hf,
                self.initial_load_in_hf_quantized,
            )
        if (checkpoint / CARD).is_file():
            if (wrong := _damage(checkpoint)) is not None:
                instead = folder.remedy(checkpoint, _damage) if own else "take another checkpoint"
                raise ConfigError(f"{wrong}; {instead}")
            if (
                own
                and TRAIN_STATE in state_dict
                and (differing := changes(read_card(checkpoint).job, self.config.job))
            ):
                logger.info(
                    f"{checkpoint.name} is of a job with other values, which this one's replace: {differing}"
                )
        with self._failures_as_one_line(f"{checkpoint} can't be loaded"):
            reader = CheckpointReader(checkpoint)
            saved = reader.read_metadata().state_dict_metadata
            if any(map(adapted, self._lms)):  # `check_saved` has refused a checkpoint that lacks more
                state_dict = without_tensors(state_dict, but=saved)
            if OPTIMIZER in state_dict:
                state_dict = state_dict | {OPTIMIZER: SavedStates(state_dict[OPTIMIZER], with_state(saved))}
            dcp.load(state_dict, storage_reader=reader, planner=Planner())
        self.states[MODEL].load_state_dict(state_dict)

    def load_weights(self, checkpoint: Path) -> int:
        """Load the weights alone of a checkpoint; return its step, 0 where no card names it.

        Raises:
            ConfigError: a file of it is not as it was written.
        """
        weights, in_hf = self.states[MODEL].state_dict(), not (checkpoint / ".metadata").is_file()
        if in_hf and (checkpoint / CARD).is_file() and (wrong := _damage(checkpoint)) is not None:
            raise ConfigError(f"{wrong}; take another checkpoint")
        self.dcp_load(weights, str(checkpoint), in_hf, False)
        return read_card(checkpoint).step if (checkpoint / CARD).is_file() else 0

    def _find_load_step(self, folder: str = "") -> int:
        return -1  # `_load` has looked

    @contextmanager
    def _failures_as_one_line(self, what: str) -> Iterator[None]:
        """Make one line of CheckpointException, which torch raises on all ranks if some failed."""
        try:
            yield
        except CheckpointException as failed:
            self.save_future = None
            if dist.get_rank() == 0:
                folder.tidy(self.path, ["writing"])  # no rank writes any more
            cause = cause_of(failed)
            if isinstance(cause, UserError):
                raise cause from None
            if isinstance(cause, OSError):
                raise NotSaved(f"{what} ({disk.reason(cause)}); {self.resume_point()}") from failed
            raise RuntimeError(f"{what}: {type(cause).__name__}: {cause}") from failed

    def resume_point(self) -> str:
        """Return from where the job can resume, in words, once pending writes are done."""
        self.maybe_wait_for_saving()
        return folder.newest(self.path)


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
            logger.info(
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
