"""Micro batches and chunks of the loss that stand for others: the forecast is that of all of them."""

import pytest

from tests import zoo
from tests.support import rehearsals
from titanplans.foresight import rehearsal
from titanplans.foresight.forecast import shortened
from titanplans.foresight.pipeline import Crossing

PP, FOUR_STAGES = (f"parallelism.pipeline_parallel_degree={degree}" for degree in (2, 4))
MICRO_BATCHES = "training.local_batch_size=6"
BFLOAT16 = "training.mixed_precision_param=bfloat16"


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("llama", 2, ["loss.chunk_tokens=8", BFLOAT16]),
        ("llama", 2, ["loss.chunk_tokens=7", "parallelism.tensor_parallel_degree=2"]),
        ("llama", 4, [PP, MICRO_BATCHES, BFLOAT16, "activation_checkpoint.mode=full"]),
        ("llama", 4, [PP, MICRO_BATCHES, "parallelism.tensor_parallel_degree=2"]),
        ("llama", 8, [FOUR_STAGES, MICRO_BATCHES, BFLOAT16, "loss.chunk_tokens=8"]),
        ("llama", 4, [PP, MICRO_BATCHES, BFLOAT16, "parallelism.fsdp_reshard_after_forward=always"]),
        ("llama", 4, [PP, MICRO_BATCHES, BFLOAT16, "training.gradient_accumulation_steps=2"]),
        ("llama", 4, [PP, MICRO_BATCHES, "parallelism.pipeline_parallel_schedule=GPipe"]),
        ("llama", 4, [PP, MICRO_BATCHES, "parallelism.pipeline_parallel_schedule=Interleaved1F1B"]),
        ("gla", 4, [PP, MICRO_BATCHES, BFLOAT16]),
        ("qwen3_moe", 4, [PP, MICRO_BATCHES, "parallelism.expert_parallel_degree=2"]),
    ],
)
def test_repeated_parts_have_the_events_of_those_that_run(tmp_path, name, ranks, options):
    job = rehearsals.job(tmp_path, *options)
    config = zoo.config(name, options=False, num_hidden_layers=5)
    config.output_router_logits = False  # no pipeline stage has the routers of all blocks
    rehearsals.install()
    job, depth = shortened(job, config, every_block=True)
    crossing, others = Crossing(), Crossing()
    stages = job.parallelism.pipeline_parallel_degree
    for stage in range(stages):
        rank = stage * ranks // stages
        repeated = rehearsal.rehearse(job, config, ranks, rank, depth.removed, crossing).record
        every = rehearsal.rehearse(job, config, ranks, rank, depth.removed, others, repeats=False).record
        assert repeated.events == every.events
        assert repeated.allocations == every.allocations
        assert repeated.operations == every.operations
        assert (repeated.live, repeated.peak) == (every.live, every.peak)
