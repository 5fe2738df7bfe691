"""The stages of this process, and the schedule that runs them."""

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
from titanplans.torch_private.pipelining import keep_forwards
from titanplans.training.pipeline.report import PipelineReport, describe
from titanplans.training.pipeline.stage import ScheduledStage, stages_of


class Pipeline:
    """The stages of this process, run by a schedule of torch's.

    Args:
        stages: makes the stages of this process, each of whose parts is a `LanguageModel`, parallelised.
        shared: of each parameter that several stages hold, its name in each.
    """

    def __init__(
        self,
        stages: Callable[[], Sequence[ScheduledStage]],
        shared: Sequence[Mapping[int, str]],
        description: dict[str, Any],
    ):
        self._make, self._description = stages, description
        self._kind = get_schedule_class(description["schedule"])
        self.splits_backward = schedule_of(description["schedule"]).splits_backward
        self._schedules: dict[tuple[bool, int], tuple[Any, Sequence[ScheduledStage]]] = {}
        own = stages()
        self.model_parts, self.group = [stage.part for stage in own], own[0].group
        ranks = [stage["rank"] for stage in description["stages"]]
        models = {stage.stage_index: stage.part.lm for stage in own}
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
        """Run a batch through all stages, in so many `microbatches`; return its loss, the same on every rank.

        Args:
            tokens, labels, positions: each `[local_batch_size, seq_len]`, given to every rank.
            microbatches: equal slices of the batch, which the schedule cuts.
            valid_tokens: of the whole batch of a step: forward and backward, and a mean over them. None, for validation: the
                forward alone, and a sum over tokens.
        """
        evaluates = valid_tokens is None
        schedule, stages = self._schedule(evaluates, microbatches)
        for stage in stages:
            stage.valid_tokens = valid_tokens
        losses: list[torch.Tensor] = []  # where the last stage is
        run = schedule.eval if evaluates else schedule.step
        inputs = {"tokens": tokens, "labels": labels, "positions": positions}
        run(target=labels, losses=losses, return_outputs=False, **inputs)
        total = torch.zeros((), device=tokens.device)
        if losses:
            total = torch.stack([loss.detach().float() for loss in losses]).sum()
        dist.all_reduce(total, group=self.group)
        return total

    def _schedule(self, evaluates: bool, microbatches: int) -> tuple[Any, Sequence[ScheduledStage]]:
        """Return a schedule, and its stages: torch's keep the shapes of what is sent, and validation has others."""
        if (evaluates, microbatches) not in self._schedules:
            stages, kind = self._make(), self._kind
            schedule = kind(
                list(stages) if issubclass(kind, PipelineScheduleMulti) else stages[0],
                n_microbatches=microbatches,
                loss_fn=lambda loss, _: loss.clone(),  # torch detaches in place what the last stage gives
                scale_grads=False,
            )
            if evaluates and issubclass(kind, PipelineScheduleMulti):
                keep_forwards(schedule)
            self._schedules[evaluates, microbatches] = schedule, stages
        return self._schedules[evaluates, microbatches]

    def report(self, micro_batches: int, dump_folder: str) -> PipelineReport:
        """Return the part of the parallelism report on this pipeline, which takes so many micro batches at once."""
        return PipelineReport(self._description, self.training_stages, micro_batches, Path(dump_folder))

    def training_stages(self) -> list[ScheduledStage]:
        """Return the stages that train, which the first step makes."""
        made = self._schedules.items()
        return [stage for (evaluates, _), (_, stages) in made if not evaluates for stage in stages]

    def sum_shared_gradients(self) -> None:
        """Give what several stages hold the sum of their gradients."""
        self._shared.sum_gradients()

    def counted(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `parameters` that count into a norm here: what several stages hold counts in the first."""
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
) -> Pipeline:
    """Return the stages that this process has of `model`, a whole `LanguageModel` on meta, and their schedule.

    Raises:
        ParallelError: so many stages are not possible, or can't be told from a forward on meta.
        PlanError, OptionError: as `parallelize`.
    """
    mesh, group = parallel_dims.get_mesh("pp"), parallel_dims.get_mesh("pp").get_group()
    stages = stages_of(model.lm, options, mesh.size(), seq_len)
    description = describe(model.lm, stages, options.pipeline_parallel_schedule, mesh.size(), seq_len)
    parts = {}
    for number, stage in enumerate(description["stages"]):
        if stage["rank"] == mesh.get_local_rank():
            parts[number] = copy.deepcopy(model)
            parallelize_stage(parts[number].lm, stages, number, parallel_dims, strategy, dump_folder)

    def make() -> list[ScheduledStage]:
        return [ScheduledStage(part, at, len(stages), device, group, loss) for at, part in parts.items()]

    return Pipeline(make, [*stages.shared.values()], description)
