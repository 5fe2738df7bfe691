"""Forecasts of tiny jobs: what follows from the sizes of their tensors, and what is refused."""

import itertools

import pytest
import torch

from tests import zoo
from tests.support import rehearsals
from titanplans import modeling
from titanplans.errors import UserError
from titanplans.foresight.forecast import assumptions
from titanplans.foresight.forecast import forecast as forecast_job
from titanplans.foresight.hardware import find_gpu
from titanplans.foresight.memory import ACTIVATIONS, GATHERED, BlocksDiffer
from titanplans.foresight.rehearsal import OPTIMIZER, WEIGHTS

LLAMA = {
    "options": False,
    "num_hidden_layers": 6,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 1024,
}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}


def forecast(folder, *options, ranks=2, name="llama", **sizes):
    (result,) = rehearsals.forecasts(
        rehearsals.job(folder, *options), zoo.config(name, **(LLAMA | sizes)), ranks
    )
    return result


def parameters(**sizes):
    return sum(p.numel() for p in modeling.build(zoo.config("llama", **(LLAMA | sizes))).parameters())


@pytest.mark.parametrize("ranks", [2, 8])
def test_weights_gradients_and_moments_are_sharded(tmp_path, ranks):
    result = forecast(tmp_path, "training.local_batch_size=1", "training.seq_len=4", ranks=ranks)
    shard = parameters() * 4 / ranks
    assert result.parts[WEIGHTS] == shard
    assert result.parts[OPTIMIZER] == pytest.approx(2 * shard, rel=1e-3)  # the counts of steps are scalars
    (clip,) = (size for segment, size in result.timeline if segment.kind == "clip")
    assert clip == pytest.approx(4 * shard, rel=5e-3)  # with the gradients, and no activations


def test_weights_in_bfloat16(tmp_path):
    assert forecast(tmp_path, "training.dtype=bfloat16").parts[WEIGHTS] == parameters() * 2 / 2


def test_recomputed_activations_are_not_kept(tmp_path):
    kept, recomputed = (
        forecast(tmp_path, f"activation_checkpoint.mode={mode}", "training.seq_len=512").parts[ACTIVATIONS]
        for mode in ("none", "full")
    )
    hidden_states = 2 * 512 * LLAMA["hidden_size"] * 4
    assert recomputed < 10 * hidden_states < kept


def test_a_fused_loss_has_the_logits_of_a_chunk(tmp_path):
    options = ("training.seq_len=512", "activation_checkpoint.mode=full")
    chunked, unfused = (
        next(
            size for segment, size in forecast(tmp_path, option, *options).timeline if segment.kind == "loss"
        )
        for option in ("loss.chunk_tokens=64", "loss.fused=false")
    )
    logits = 2 * 512 * LLAMA["vocab_size"] * 4
    assert chunked < unfused - 2 * logits


def test_sequences_split_activations(tmp_path):
    whole, split = (
        forecast(tmp_path, "training.seq_len=512", f"parallelism.context_parallel_degree={cp}", ranks=4)
        for cp in (1, 4)
    )
    assert split.parts[ACTIVATIONS] == pytest.approx(whole.parts[ACTIVATIONS] / 4, rel=0.1)


def test_parameters_that_are_kept_gathered(tmp_path):
    options = ("training.seq_len=512", "parallelism.fsdp_reshard_after_forward=never")
    result = forecast(tmp_path, *options)
    assert result.parts[GATHERED] == pytest.approx(parameters() * 2, rel=0.1)  # in bfloat16


def test_tokens_are_distributed_evenly_over_experts(tmp_path):
    """With tokens for a single expert, a rank would receive all of them or none."""
    options = ("training.seq_len=256", "parallelism.expert_parallel_degree=2")
    config = zoo.config("qwen3_moe", options=False)
    (result,) = rehearsals.forecasts(rehearsals.job(tmp_path, *options), config, 2)
    (limited,) = rehearsals.forecasts(
        rehearsals.job(tmp_path, *options, "parallelism.expert_capacity_factor=0.5"), config, 2
    )
    assert limited.parts[ACTIVATIONS] < result.parts[ACTIVATIONS]
    assert "evenly" in " ".join(assumptions(rehearsals.job(tmp_path, *options)))


def test_the_timeline_has_the_peak(tmp_path):
    result = forecast(tmp_path, "training.seq_len=512")
    assert max(size for _, size in result.timeline) == result.live == sum(result.parts.values())
    assert (result.when, result.live) in result.timeline
    assert [segment.block for segment, _ in result.timeline if segment.kind == "forward"] == list(range(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["training.enable_cpu_offload=true"], "training.enable_cpu_offload = true can't be estimated"),
        (["parallelism.data_parallel_strategy=ddp"], 'data_parallel_strategy = "ddp" can\'t be estimated'),
    ],
)
def test_what_is_refused(tmp_path, options, message):
    with pytest.raises(UserError) as error:
        forecast(tmp_path, *options)
    assert message in str(error.value)
    assert not torch.distributed.is_initialized()


def test_a_model_whose_step_reads_values_is_refused(tmp_path):
    with pytest.raises(UserError, match="reads values of tensors"):
        rehearsals.forecasts(rehearsals.job(tmp_path), zoo.config("moba"), 2)


def test_no_mask_is_made_for_joined_documents(tmp_path):
    """A mask has a byte for each pair of tokens, as the step of a job with long sequences has none."""
    short, long = (
        forecast(tmp_path, f"training.seq_len={length}").parts[ACTIVATIONS] for length in (256, 1024)
    )
    assert long == pytest.approx(4 * short, rel=0.01)


class Growing(torch.nn.Linear):
    """A layer that keeps more of its output with each instance; nothing in its attributes tells."""

    def forward(self, x):
        return super().forward(x) + x.repeat(1, 1, next(self.sizes)).exp().sum(-1, keepdim=True)


def test_blocks_that_look_alike_and_differ(tmp_path, monkeypatch):
    """If a block can't stand for the others, all blocks are rehearsed."""
    job = rehearsals.job(tmp_path)
    config = zoo.config("llama", **LLAMA)
    build = modeling.build

    def build_growing(*args):
        model = build(*args)
        for index, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.__class__ = Growing
            layer.mlp.down_proj.sizes = itertools.repeat(1 + index % 2 * 3)
        return model

    monkeypatch.setattr(modeling, "build", build_growing)
    monkeypatch.setattr("titanplans.training.job.resolve.hf_config", lambda job: config)
    result = forecast_job(job, 2, find_gpu("H100")).ranks[0].memory
    (full,) = rehearsals.forecasts(job, config, 2, every_block=True)
    assert result.parts == full.parts
    with pytest.raises(BlocksDiffer):
        rehearsals.forecasts(job, config, 2)
