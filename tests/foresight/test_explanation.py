"""An explanation says how each module is split, what the ranks send, and what the backward recomputes."""

from collections import Counter

import pytest

from tests.support import rehearsals
from titanplans import modeling
from titanplans.config import load_job
from titanplans.foresight.explanation import explain
from titanplans.foresight.hardware import find_gpu

JOB = """
[model]
config = "{folder}/config.json"
[training]
local_batch_size = 2
seq_len = 32
mixed_precision_param = "bfloat16"
[activation_checkpoint]
mode = "none"
"""
TOKENS, HIDDEN = 2 * 32, 128
NAMES = [f"model.layers.{index}" for index in range(8)]


@pytest.fixture
def explained(tmp_path):
    rehearsals.install()

    def run(*options, ranks=2, name="qwen3"):
        config = modeling.load_config(name, "debug")
        config.num_hidden_layers = 8
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1] * 8
        config.save_pretrained(tmp_path)
        file = tmp_path / "job.toml"
        file.write_text(JOB.format(folder=tmp_path))
        return explain(load_job([str(file), *options]), ranks, find_gpu("H100"))

    return run


TP = "--parallelism.tensor_parallel_degree=2"


def modules_of(block):
    return {module.name: module for module in block.modules}


def parameter(module):
    (only,) = module.parameters
    return only


def test_modules_of_a_block_under_tensor_parallelism(explained):
    (stage,) = explained(TP).stages
    assert stage.report["tensor_parallel"]["plan"] == "Qwen3Plan"
    assert [name for block in stage.blocks for name in block.names] == NAMES
    assert all(block.modules == stage.blocks[0].modules for block in stage.blocks)
    modules = modules_of(stage.blocks[0])
    q_proj = modules["self_attn.q_proj"]
    assert (q_proj.style, q_proj.output, q_proj.unsplit) == ("Colwise", (2, 32, 128), (2, 32, 256))
    assert parameter(q_proj).shape == (256, 128)
    assert parameter(q_proj).local == (128, 128)
    assert parameter(q_proj).placements == (("tp", "Shard(0)"),)
    assert parameter(q_proj).bytes == 128 * 128 * 4  # float32
    assert parameter(modules["self_attn.o_proj"]).local == (128, 128)
    q_norm = parameter(modules["self_attn.q_norm"])
    assert (q_norm.local, q_norm.sums_gradient, q_norm.placements) == (
        q_norm.shape,
        True,
        (("tp", "Replicate"),),
    )
    assert modules["input_layernorm"].output == (2, 16, 128)  # its tokens are sharded
    assert {module.name for module in stage.others} == {"model.embed_tokens", "model.norm", "lm_head"}


def test_what_a_block_sends_in_a_step(explained):
    (stage,) = explained(TP).stages
    sent = Counter()
    for transfer in (t for block in stage.blocks for t in block.transfers):
        sent[transfer.mesh, transfer.phase, transfer.operation] += transfer.bytes
    # A rank of a ring of 2 receives half of the hidden states, in bfloat16.
    crossing = TOKENS * HIDDEN * 2 // 2
    for phase in ("forward", "backward"):
        assert sent["tp", phase, "reduce_scatter"] == 8 * 2 * crossing  # two regions of 8 blocks
    assert sent["tp", "forward", "all_gather"] == 8 * 2 * crossing
    # The stream begins at the first block, whose input every rank has.
    assert sent["tp", "backward", "all_gather"] == (8 * 2 + 1) * crossing
    # Replicated parameters' gradients are summed over the ranks, in one collective for each block.
    assert sent["tp", "backward", "all_reduce"] > 0
    assert not any(phase == "recomputed" for _, phase, _ in sent)


def test_the_explained_collectives_are_those_that_the_time_is_estimated_from(explained):
    explanation = explained(TP, "--training.global_batch_size=8")  # four batches are accumulated
    (stage,) = explanation.stages
    forward = [t for b in stage.blocks for t in b.transfers if t.phase == "forward" and t.mesh == "tp"]
    assert sum(t.count for t in forward) == 4 * 8 * 4
    assert [t.transfer.operation for t in stage.blocks[0].forward if t.transfer] == [
        "all_gather",
        "reduce_scatter",
    ] * 2


def test_what_is_recomputed(explained):
    def again(*options):
        (stage,) = explained(TP, *options).stages
        return [(s.module, s.recomputed, s.operators) for b in stage.blocks for s in b.forward]

    assert all(recomputed == 0 for _, recomputed, _ in again())
    assert all(
        recomputed == operators for _, recomputed, operators in again("--activation_checkpoint.mode=full")
    )
    by_operator = again(
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"
    )
    assert any(recomputed == 0 for _, recomputed, _ in by_operator)  # such as every second product
    assert all(recomputed == operators for name, recomputed, operators in by_operator if "layernorm" in name)


def test_heads_are_split_over_tensor_and_context_parallel_ranks(explained):
    (stage,) = explained(TP, "--parallelism.context_parallel_degree=2", ranks=4).stages
    q_proj = modules_of(stage.blocks[0])["self_attn.q_proj"]
    assert parameter(q_proj).local == (256 // 4, 128)
    assert {t.mesh for b in stage.blocks for t in b.transfers} == {"tp", "cp", "fsdp"}


def test_experts_on_their_ranks(explained):
    options = ("--parallelism.expert_parallel_degree=4", TP)
    (stage,) = explained(*options, ranks=4, name="qwen3_moe").stages
    experts = modules_of(stage.blocks[0])["mlp.experts"]
    assert [p.local[0] * 4 for p in experts.parameters] == [p.shape[0] for p in experts.parameters]
    assert "ep" in {t.mesh for b in stage.blocks for t in b.transfers}


def test_stages_of_a_pipeline_have_their_own_blocks(explained):
    explanation = explained(TP, "--parallelism.pipeline_parallel_degree=2", ranks=4)
    first, last = explanation.stages
    assert [name for stage in (first, last) for b in stage.blocks for name in b.names] == NAMES
    assert min(len(stage.blocks) for stage in (first, last)) >= 1
    assert {module.name for module in last.others} == {"model.norm", "lm_head"}
    output = first.blocks[0].modules[0].output
    assert output == (1, 16, HIDDEN)  # a micro batch of one sequence
    assert first.blocks[0].modules[0].unsplit == (1, 32, HIDDEN)


def test_without_a_plan_fsdp_shards_the_model(explained):
    (stage,) = explained(ranks=4).stages
    assert stage.report["tensor_parallel"] is None
    weight = parameter(modules_of(stage.blocks[0])["mlp.up_proj"])
    assert weight.local == weight.shape
    assert weight.bytes == weight.shape[0] * weight.shape[1] * 4 / 4
    assert dict(weight.placements) == {"dp_shard": "Shard(0)"}
