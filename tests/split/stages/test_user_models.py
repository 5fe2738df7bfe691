"""Stages of a job for models of the user: bit-identical to the model, or refused before a process starts."""

import copy
import re

import pytest
import torch

from tests.support import pipeline_models
from tests.support.stage_comparison import check
from titanplans.config import JobConfig
from titanplans.errors import ParallelError
from titanplans.modeling.user_model import construct_user_model, user_model_config
from titanplans.training.pipeline.stage import check_stages_on_meta, stages_of


def parallelism(starts):
    options = JobConfig().parallelism
    return options.replace(pipeline_parallel_split_points=[f"layers.{at}" for at in starts])


def job_stages(name, starts):
    """Return the stages that a job makes of the model `name` after its checks, and the model as the job wraps it."""
    config = user_model_config(f"tests.support.pipeline_models:{name}", {})
    on_meta = construct_user_model(config, torch.device("meta"), torch.float32)
    stages = stages_of(on_meta, parallelism(starts), len(starts) + 1, 8)
    check_stages_on_meta(on_meta, stages, 8)
    torch.manual_seed(0)
    return stages, construct_user_model(config, torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("starts", [(2,), (1, 3)], ids=str)
@pytest.mark.parametrize("name", pipeline_models.SUPPORTED)
def test_stages_equal_the_model(name, starts):
    stages, model = job_stages(name, starts)
    inputs = {"input_ids": torch.randint(pipeline_models.VOCABULARY, (2, 8))}
    built = [stages.build_stage(copy.deepcopy(model), at) for at in range(len(stages))]
    for stage in built:
        stage.watch()
    check(model, built, inputs)


@pytest.mark.parametrize("name", pipeline_models.REFUSED)
def test_models_that_stages_can_not_run_are_refused(name):
    _, pattern = pipeline_models.REFUSED[name]
    with pytest.raises(ParallelError, match=pattern) as refusal:
        job_stages(name, (2,))
    message = str(refusal.value)
    assert re.match(rf"{name} can't be split into stages: ", message)
    assert "without stages (pipeline_parallel_degree = 1)" in message
