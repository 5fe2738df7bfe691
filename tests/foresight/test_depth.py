"""Blocks that stand for others: the forecast is that of all blocks."""

import pytest

from tests import zoo
from tests.support import rehearsals
from titanplans.foresight.depth import Depth, Repetition

TP, CP, EP, PP = (
    f"parallelism.{axis}_parallel_degree=2" for axis in ("tensor", "context", "expert", "pipeline")
)
BFLOAT16 = "training.mixed_precision_param=bfloat16"
COMPILED = "compile.enable=true"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaaaaaaa", (2, 1, 5)),
        ("baaaaaaaaa", (3, 1, 5)),  # the first block is another, as in DeepSeek-V3
        ("abababababab", (2, 2, 4)),
        ("aaabaaabaaabaaabaaab", (4, 4, 3)),
        ("abcdefgh", (0, 1, 1)),
        ("aaaaa", (0, 1, 1)),  # two on either side, and one that would stand for itself
        ("a", (0, 1, 1)),
    ],
)
def test_blocks_that_stand_for_others(kinds, expected):
    assert Repetition.find(kinds) == expected


def test_each_block_is_rehearsed_or_stands_for_others():
    depth = Depth("baaaaaaaaaaaaaa", starts=(0, 8))
    assert sorted(block for places in depth.places for block in places) == list(range(15))
    assert sorted(depth.removed) == [4, 5, 11, 12]
    assert [depth.places[start] for start in depth.starts] == [(0,), (8,)]


@pytest.mark.parametrize(
    ("name", "layers", "ranks", "options"),
    [
        ("llama", 8, 4, [TP, BFLOAT16, "loss.chunk_tokens=16"]),
        ("llama", 8, 2, [CP, "loss.fused=false", "activation_checkpoint.mode=full"]),
        ("qwen3", 7, 2, ["activation_checkpoint.mode=selective", "training.gradient_accumulation_steps=4"]),
        ("llama", 8, 2, ["optimizer.implementation=for-loop", BFLOAT16]),
        ("gla", 8, 2, [TP]),
        ("qwen3_moe", 8, 2, [EP, BFLOAT16]),
        ("deepseek_v3", 9, 2, [TP, EP]),
        ("gemma3_text", 18, 2, [TP]),
        ("yoco", 12, 2, []),
        ("llama", 16, 2, [PP, "training.local_batch_size=4", BFLOAT16]),
        ("llama", 16, 2, [PP, "training.local_batch_size=4", "parallelism.pipeline_parallel_schedule=GPipe"]),
        ("llama", 8, 4, [COMPILED, TP, BFLOAT16, "loss.chunk_tokens=16"]),
        ("qwen3", 7, 2, [COMPILED, "loss.fused=false", "activation_checkpoint.mode=full"]),
        ("gla", 8, 2, [COMPILED]),
        ("gemma3_text", 18, 2, [COMPILED, TP]),
        ("llama", 16, 2, [COMPILED, PP, "training.local_batch_size=4", BFLOAT16]),
    ],
)
def test_the_forecast_is_that_of_all_blocks(tmp_path, name, layers, ranks, options):
    job, config = (
        rehearsals.job(tmp_path, *options),
        zoo.config(name, options=False, num_hidden_layers=layers),
    )
    forecast = rehearsals.forecast(job, config, ranks)
    everything = rehearsals.forecast(job, config, ranks, every_block=True)
    assert forecast.seconds == pytest.approx(everything.seconds, rel=0.02)
    assert forecast.idle == pytest.approx(everything.idle, abs=0.02)
    for rank, full_rank in zip(forecast.ranks, everything.ranks, strict=True):
        # Collectives of scalars are not repeated: those of the loss that balances experts.
        assert rank.time.parts == pytest.approx(full_rank.time.parts, rel=0.02, abs=1.5e-5)
        memory, full = rank.memory, full_rank.memory
        # Scalars are not repeated: norms of gradients, and the load of experts.
        assert memory.parts == pytest.approx(full.parts, abs=4096)
        assert memory.when == full.when
        peaks, full_peaks = (
            {segment: size for segment, size in each.timeline if segment.kind != "schedule"}
            for each in (memory, full)
        )
        assert peaks == pytest.approx(full_peaks, abs=4096)
        assert memory.standard.reserved == full.standard.reserved
        assert memory.expandable.reserved == full.expandable.reserved
