"""A training step of a pipeline over real process groups, by the code of jobs; for `step_comparison.compare`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from tests.support import step_comparison
from titanplans.config import JobConfig
from titanplans.config.schema import strategy_of
from titanplans.config.sections.optimization import Loss
from titanplans.parallel.record import record_of
from titanplans.split.gradients import align_gradients, clip_gradients
from titanplans.split.objects import gather_objects
from titanplans.training.pipeline.pipeline import Pipeline, build_pipeline
from titanplans.training.trainer.loss import CrossEntropyLoss
from titanplans.training.trainer.model import LanguageModel


def train(
    config: PretrainedConfig, job: JobConfig, mesh: Any, case: step_comparison.Case
) -> step_comparison.Trained:
    """Train one step of the stages that this rank of `mesh` has; return it for the whole model."""
    pipeline = _build(config, job, mesh, case.length)
    ids, labels = step_comparison.batch(case, mesh.get_mesh("dp").get_group())
    microbatches = len(ids) // job.parallelism.pipeline_parallel_microbatch_size
    positions, tokens = torch.arange(case.length).expand_as(ids), torch.tensor(case.rows * case.length)
    loss = pipeline.run(ids, labels, positions, microbatches=microbatches, valid_tokens=tokens)
    dist.all_reduce(loss, group=mesh.get_mesh("loss").get_group())
    parameters = [parameter for part in pipeline.model_parts for parameter in part.lm.parameters()]
    pipeline.sum_shared_gradients()
    norm = clip_gradients(
        parameters, torch.inf, pp_group=pipeline.group, counted=pipeline.counted(parameters)
    )
    align_gradients(parameters)
    own = [(name, parameter) for part in pipeline.model_parts for name, parameter in _whole_names(part.lm)]
    gradients = _of_all(
        pipeline, [(name, None if p.grad is None else step_comparison.full_copy(p.grad)) for name, p in own]
    )
    torch.optim.SGD(parameters, lr=1.0).step()
    return step_comparison.Trained(
        loss, norm, gradients, _of_all(pipeline, [(name, step_comparison.full_copy(p)) for name, p in own])
    )


def _build(config: PretrainedConfig, job: JobConfig, mesh: Any, length: int) -> Pipeline:
    """Return the stages, with the weights that `equal`'s whole model has: they are drawn with seed 0."""
    loss = CrossEntropyLoss(Loss(fused=False))
    pipeline = build_pipeline(
        LanguageModel(config),
        job.parallelism,
        strategy_of(job),
        parallel_dims=mesh,
        seq_len=length,
        device=torch.device("cpu"),
        loss=loss,
        dump_folder="",
    )
    torch.manual_seed(0)
    for part in pipeline.model_parts:
        part.lm.to_empty(device="cpu")
        part.initialize()
        part.set_loss(loss, None, splits_backward=pipeline.splits_backward)
        part.lm.train()
    return pipeline


def _whole_names(stage: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of `stage` by their names in the whole model."""
    names = record_of(stage).unsplit_names
    return [
        (names.get(step_comparison.unwrapped_name(name), step_comparison.unwrapped_name(name)), p)
        for name, p in stage.named_parameters()
    ]


def _of_all(pipeline: Pipeline, own: list[tuple[str, torch.Tensor | None]]) -> dict[str, Any]:
    """Return what all stages have, by name; what several of them have is the same to the bit."""
    found: dict[str, Any] = {}
    for name, tensor in (pair for pairs in gather_objects(own, pipeline.group) for pair in pairs):
        if tensor is not None and found.setdefault(name, tensor) is not tensor:
            assert torch.equal(found[name], tensor), f"{name}: stages that share it differ"
        found.setdefault(name, None)
    return found
