"""A job whose plan is a function that returns a dict of torch's styles, named as NeMo Automodel does."""

import json
import os
import sys

import pytest

from tests.support.jobs import Job, run_titanplans

pytestmark = pytest.mark.thorough

PLANS = """
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


def llama():
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 4096,
    "intermediate_size": 48,
}
PLAIN = ("--parallelism.no-enable_sequence_parallel", "--parallelism.disable_loss_parallel")


def in_the_folder(arguments):
    sys.path.insert(0, os.getcwd())
    run_titanplans(arguments)


def test_a_job_trains_with_a_plan_that_is_written_for_automodel(tmp_path):
    job = Job(tmp_path)
    (tmp_path / "gla.json").write_text(json.dumps(LLAMA))
    (tmp_path / "automodel_plans.py").write_text(PLANS)

    def losses(*options, dump):
        options = ("--training.steps=4", f"--job.dump_folder={dump}", *options)
        assert job.run(*options, entry=in_the_folder) == 0, job.out + job.err
        return {step: float(loss) for step, loss in job.losses}

    split = losses("--model.plan=automodel_plans.llama", *PLAIN, dump="split")
    assert "Plan: user's automodel_plans.llama" in job.out
    assert split == pytest.approx(losses("--parallelism.tensor_parallel_degree=1", dump="unsplit"), rel=2e-5)
    assert job.run("--model.plan=automodel_plans.llama", entry=in_the_folder) == 2
    assert job.err.startswith(
        "error: sequence_parallel = True: a dict of torch's styles alone does not shard"
    )
    assert job.err.count("\n") == 1
