"""One training step of a pipeline, with the code of jobs, over real process groups. See `step_comparison.compare`."""

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
    """Train this rank's stages for one step; return the results of all stages, by their names in the unsplit model."""
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
    local = [
        (name, parameter) for part in pipeline.model_parts for name, parameter in _unsplit_names(part.lm)
    ]
    gradients = _of_all(
        pipeline, [(name, None if p.grad is None else step_comparison.full_copy(p.grad)) for name, p in local]
    )
    torch.optim.SGD(parameters, lr=1.0).step()
    return step_comparison.Trained(
        loss, norm, gradients, _of_all(pipeline, [(name, step_comparison.full_copy(p)) for name, p in local])
    )


def _build(config: PretrainedConfig, job: JobConfig, mesh: Any, length: int) -> Pipeline:
    """Return this rank's stages, initialized with seed 0. The unsplit model of the comparison is initialized the same
    way."""
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


def _unsplit_names(stage: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of `stage` with their names in the unsplit model."""
    names = record_of(stage).unsplit_names
    return [
        (names.get(step_comparison.unwrapped_name(name), step_comparison.unwrapped_name(name)), p)
        for name, p in stage.named_parameters()
    ]


def _of_all(pipeline: Pipeline, local: list[tuple[str, torch.Tensor | None]]) -> dict[str, Any]:
    """Gather the tensors of all stages by name; check that a tensor that several stages have is bit-identical in them."""
    tensors: dict[str, Any] = {}
    for name, tensor in (pair for pairs in gather_objects(local, pipeline.group) for pair in pairs):
        if tensor is not None and tensors.setdefault(name, tensor) is not tensor:
            assert torch.equal(tensors[name], tensor), f"{name}: stages that share it differ"
        tensors.setdefault(name, None)
    return tensors
