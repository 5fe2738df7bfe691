"""How a job's checkpoint is chosen, checked and loaded: the half of the checkpoint manager that reads.

What is saved, and when, is in manager.py.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.components.checkpointer
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.tools.logging import logger

from titanplans import disk
from titanplans.adapters.low_rank import adapted
from titanplans.errors import ConfigError, NotSaved, UserError
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.card import CARD, damage, read_card
from titanplans.training.checkpoint.match import changes, has_gone_on_from, to_resume
from titanplans.training.checkpoint.storage import CheckpointReader, Planner, cause_of
from titanplans.weights.adapters import load_adapter
from titanplans.weights.gather import of_all
from titanplans.weights.load import load_weights


class CheckpointLoader(torchtitan.components.checkpointer.CheckpointManager):
    """torchtitan's manager, which loads nothing that is damaged.

    Attributes:
        config: a `CheckpointManager.Config`.
        path: the folder of the job's checkpoints.
    """

    config: Any
    path: Path

    def _load(self, step: int = -1) -> bool:
        """Load what `step` says, -1 for the newest from which training goes on; what came later is set aside.

        Raises:
            ConfigError: there is none, or a file of it is not as it was written.
        """
        step = of_all(self._step_to_load(step) if dist.get_rank() == 0 else None)[0]
        loaded = super()._load(step)
        if step == -1 and (adapter := self.config.initial_adapter_path) is not None:
            load_adapter(self._lm, adapter)
            logger.info(f"the adapters are those of {adapter}")
        if step != -1 and not self.load_only:
            dist.barrier()  # all ranks have read before one renames
            if dist.get_rank() == 0 and (aside := folder.set_aside(self.path, later_than=step)):
                logger.info(f"checkpoints after step {step} were set aside, into {aside}")
        return loaded

    @property
    def _lm(self) -> Any:
        (part,) = self.states[MODEL].model
        return part.lm

    def _step_to_load(self, step: int) -> int:
        if step != -1 and not (self.config.restarted and has_gone_on_from(self.path, step)):
            return step
        newest = to_resume(self.path)
        last = folder.steps(self.path)[-1:]
        if newest is not None and newest.name != f"step-{last[0]}":
            logger.info(
                f"the job resumes from {newest.name} and repeats the steps up to {last[0]}: step-{last[0]} holds only "
                "the weights; checkpoint.last_save_model_only = false saves the last step whole"
            )
        return -1 if newest is None else int(newest.name.removeprefix("step-"))

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Check the files of a checkpoint and load it; the optimizers keep the settings of this job.

        A Hugging Face folder (`from_hf`) holds only weights; each rank reads its parts.
        """
        checkpoint = Path(checkpoint_id)
        if from_hf:
            load_weights(self._lm, checkpoint, seed=torch.initial_seed())
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
            if own and (differing := changes(read_card(checkpoint).job, self.config.job)):
                logger.info(
                    f"{checkpoint.name} is of a job with other values, which this one's replace: {differing}"
                )
        with self._failures_as_one_line(f"{checkpoint} can't be loaded"):
            reader = CheckpointReader(checkpoint)
            if adapted(self._lm):  # `check_saved` has refused a checkpoint that lacks more
                state_dict = without_tensors(state_dict, but=reader.read_metadata().state_dict_metadata)
            dcp.load(state_dict, storage_reader=reader, planner=Planner())
        self.states[MODEL].load_state_dict(state_dict)

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
                folder.discard(self.path)  # no rank writes any more
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


def without_tensors(state: dict[str, Any], *, but: Collection[str]) -> dict[str, Any]:
    """Return a state `but` of tensors only those of these names."""
    return {
        name: value for name, value in state.items() if name in but or not isinstance(value, torch.Tensor)
    }


def _damage(checkpoint: Path) -> str | None:
    """As `titanplans.training.checkpoint.card.damage`; each rank reads a part of the files."""
    found = of_all(damage(checkpoint, dist.get_rank(), dist.get_world_size()))
    return next((words for words in found if words is not None), None)
