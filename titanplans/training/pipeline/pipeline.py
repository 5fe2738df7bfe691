"""`Pipeline`: this rank's stages of a model and the torch schedule that runs them. `build_pipeline` creates it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from titanplans.config import FSDP2Config
from titanplans.config.sections.parallelism import PipelineParallel
from titanplans.parallel.parallelize import parallelize_stage
from titanplans.split.stages.schedules import schedule_of
from titanplans.split.stages.shared import SharedParameters
from titanplans.torch_private.pipelining import keep_only_forwards
from titanplans.training.pipeline.report import PipelineReport, describe
from titanplans.training.pipeline.stage import ScheduledStage, stages_of


class Pipeline:
    """Runs this rank's stages of a model with one of torch's schedules.

    Args:
        make_stages: returns new torch stages for this rank; they wrap the same parallelised `LanguageModel`s each time.
        shared: for each parameter that several stages hold, its name in each stage, by stage index.
        description: the result of `report.describe`.

    Attributes:
        model_parts: the `LanguageModel`s of this rank's stages.
        group: the process group of the pipeline ranks.
        splits_backward: whether the schedule computes gradients of inputs and of weights in two passes.
    """

    def __init__(
        self,
        make_stages: Callable[[], Sequence[ScheduledStage]],
        shared: Sequence[Mapping[int, str]],
        description: dict[str, Any],
    ):
        self._make_stages, self._description = make_stages, description
        self._schedule_class = get_schedule_class(description["schedule"])
        self.splits_backward = schedule_of(description["schedule"]).splits_backward
        self._schedules: dict[tuple[bool, int], tuple[Any, Sequence[ScheduledStage]]] = {}
        stages = make_stages()
        self.model_parts, self.group = [stage.language_model for stage in stages], stages[0].group
        ranks = [stage["rank"] for stage in description["stages"]]
        models = {stage.stage_index: stage.language_model.lm for stage in stages}
        self._shared = SharedParameters(shared, models, ranks, self.group)

    def run(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor,
        *,
        microbatches: int,
        valid_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a batch through all stages and return its loss, which is the same on every rank.

        Args:
            tokens, labels, positions: each `[local_batch_size, seq_len]`, the same on every pipeline rank.
            microbatches: number of micro batches, equal slices into which the schedule splits the batch.
            valid_tokens: in training, the number of labels in the step that count, over all ranks. The loss is divided by
                this number. None (validation): only the forward runs, and the loss is the sum over tokens.
        """
        is_validation = valid_tokens is None
        schedule, stages = self._schedule(is_validation, microbatches)
        for stage in stages:
            stage.valid_tokens = valid_tokens
        losses: list[torch.Tensor] = []  # filled on the rank with the last stage
        run = schedule.eval if is_validation else schedule.step
        inputs = {"tokens": tokens, "labels": labels, "positions": positions}
        run(target=labels, losses=losses, return_outputs=False, **inputs)
        total = torch.zeros((), device=tokens.device)
        if losses:
            total = torch.stack([loss.detach().float() for loss in losses]).sum()
        dist.all_reduce(total, group=self.group)
        return total

    def _schedule(self, is_validation: bool, microbatches: int) -> tuple[Any, Sequence[ScheduledStage]]:
        """Return the schedule for training or validation with `microbatches` micro batches, and its stages."""
        key = is_validation, microbatches
        if key not in self._schedules:
            # Each schedule has its own stages: a torch stage remembers the shapes that it sends, and validation may have
            # other shapes.
            stages, schedule_class = self._make_stages(), self._schedule_class
            is_multi = issubclass(schedule_class, PipelineScheduleMulti)
            schedule = schedule_class(
                list(stages) if is_multi else stages[0],
                n_microbatches=microbatches,
                # The last stage returns the loss. It is copied, since torch detaches the stage's output in place.
                loss_fn=lambda loss, _: loss.clone(),
                scale_grads=False,
            )
            if is_validation and is_multi:
                keep_only_forwards(schedule)
            self._schedules[key] = schedule, stages
        return self._schedules[key]

    def report(self, micro_batches: int, dump_folder: str) -> PipelineReport:
        """Return this pipeline's section of the parallelism report, for batches of `micro_batches` micro batches."""
        return PipelineReport(self._description, self.training_stages, micro_batches, Path(dump_folder))

    def training_stages(self) -> list[ScheduledStage]:
        """Return this rank's torch stages for training. They are created by the first step; before it the list is empty."""
        schedules = self._schedules.items()
        return [
            stage for (is_validation, _), (_, stages) in schedules if not is_validation for stage in stages
        ]

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of each parameter that several stages hold, such as tied weights. Collective."""
        self._shared.sum_gradients()

    def counted(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the `parameters` that a norm covers on this rank: all but those that an earlier stage also holds."""
        copies = self._shared.duplicates()
        return [parameter for parameter in parameters if id(parameter) not in copies]


def build_pipeline(
    model: Any,
    options: PipelineParallel,
    strategy: FSDP2Config,
    *,
    parallel_dims: Any,
    seq_len: int,
    device: torch.device,
    loss: Any,
    dump_folder: str,
    stage_class: type[ScheduledStage] = ScheduledStage,
) -> Pipeline:
    """Split a model into stages, parallelise this rank's stages, and return them with their schedule.

    Args:
        model: the unsplit `LanguageModel`, on meta.
        options: the options in [parallelism].
        strategy: how each stage is parallelised.
        parallel_dims: a `Mesh`.
        seq_len: tokens in a training sequence.
        device: this rank's device.
        loss: the job's `CrossEntropyLoss`.
        dump_folder: the job's dump folder.
        stage_class: the class of the torch stages.

    Raises:
        ParallelError: the model can't be split into that many stages, or can't be traced on meta.
        PlanError, OptionError: `parallelize` raises it.
    """
    mesh, group = parallel_dims.get_mesh("pp"), parallel_dims.get_mesh("pp").get_group()
    stages = stages_of(model.lm, options, mesh.size(), seq_len)
    description = describe(model.lm, stages, options.pipeline_parallel_schedule, mesh.size(), seq_len)
    model_parts = {}
    for index, stage in enumerate(description["stages"]):
        if stage["rank"] == mesh.get_local_rank():
            model_parts[index] = copy.deepcopy(model)
            parallelize_stage(model_parts[index].lm, stages, index, parallel_dims, strategy, dump_folder)

    def make_stages() -> list[ScheduledStage]:
        return [
            stage_class(part, index, len(stages), device, group, loss) for index, part in model_parts.items()
        ]

    return Pipeline(make_stages, [*stages.shared.values()], description)
