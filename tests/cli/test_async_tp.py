"""`titanplans async-tp`: its decisions equal the table of docs/generated/async_tp.md; its messages and errors."""

import json

import pytest
import torch
from torch import nn
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

from tests.support.pages import async_tp
from tests.support.releases import needs_torch_2_13
from tests.support.tiny_model import Block, Tiny, TinyPlan
from titanplans import apply_plan, modeling
from titanplans.cli.async_tp import decide, graphs_end_as_on_a_gpu, prepare_block
from titanplans.cli.main import main
from titanplans.cli.verify.arguments import parse
from titanplans.cli.verify.subject import Subject
from titanplans.observe.fusible import capture
from titanplans.observe.graphs import install_record
from titanplans.proof.ranks.fake import fake_ranks

DIFFERENT = ("gla", "qwen2", "phi3", "mixtral")
"""Architectures with blocks of several graphs and of one, with biases, packed weights, and experts."""


pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("cpu_kernels")]


def silent_progress(arguments):
    """Show no progress."""


@needs_torch_2_13("the page lists the graphs that torch 2.13 compiles")
@pytest.mark.parametrize(
    "name",
    [
        n if n in DIFFERENT else pytest.param(n, marks=pytest.mark.exhaustive)
        for n in async_tp.listed_models()
    ],
)
def test_the_page_has_the_decisions(name):
    lines = async_tp.PAGE.read_text().splitlines()
    with torch._inductor.config.patch(post_grad_custom_post_pass=None):
        record = install_record()
        line, decision = async_tp.line(name)
    assert line in lines
    if decision is None:
        return
    # `async-tp` captures the first block of each kind. A training run records the same decisions for these blocks.
    verdicts = [v for blocks in decision.blocks for v in blocks.collectives]
    recorded = [c for graph in record.graphs for c in graph]
    for became in ("fused", "overlapped"):
        expected = {(v.operation, v.backward) for v in verdicts if getattr(v, became)}
        assert {(c.operation, c.phase == "backward") for c in recorded if getattr(c, became)} == expected


def test_every_registered_architecture_is_on_the_page():
    table = async_tp.PAGE.read_text().partition(async_tp.BEGIN)[2].partition(async_tp.END)[0]
    lines = table.removeprefix(async_tp.HEAD).splitlines()
    assert [line.split("`")[1] for line in lines] == async_tp.listed_models()
    assert len(lines) == 70


def test_a_length_that_the_degree_does_not_divide_is_refused(capsys):
    assert main(["async-tp", "qwen3", "--seq-len", "33", "--vocab-size", "64", "--batch-size", "1"]) == 2
    assert "a sequence length of 33 is not a multiple of 2, the number of ranks" in capsys.readouterr().err


def test_stdout_is_only_json_and_capturing_leaves_no_state(capsys):
    before = torch.distributed.is_nccl_available, torch._inductor.config._micro_pipeline_tp
    assert main(["async-tp", "llama", "--json", "--vocab-size", "64"]) == 0
    decision = json.loads(capsys.readouterr().out)
    assert (decision["complete"], decision["degree"]) == (True, 2)
    assert decision["forward"] == {"fused": 4, "overlapped": 0, "total": 4}
    assert decision["backward"] == {"fused": 2, "overlapped": 2, "total": 4}
    (blocks,) = decision["blocks"]
    assert blocks["collectives"][0]["products"] == [f"self_attn.{name}_proj" for name in "qkv"]
    assert (torch.distributed.is_nccl_available, torch._inductor.config._micro_pipeline_tp) == before
    with fake_ranks(2) as mesh:
        assert not is_symm_mem_enabled_for_group(mesh.get_group().group_name)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["async-tp"], "one of the arguments SUBJECT --all is required"),
        (["async-tp", "qwen3", "--tp", "3"], "tensor_parallel_degree = 3 does not divide"),
        (["async-tp", "qwen3", "--float8", "int4"], "argument --float8: invalid choice: 'int4'"),
    ],
)
def test_wrong_arguments_are_refused(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_job_is_decided_at_its_degree_and_its_length(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nname = "qwen3"\nflavor = "debug"\n[training]\nseq_len = 512\n[parallelism]\ntensor_parallel_degree = 4\n'
    )
    assert main(["async-tp", str(job), "--vocab-size", "64"]) == 0
    assert "tp 4, 2 sequences of 128 tokens" in capsys.readouterr().out
    job.write_text(job.read_text() + "enable_sequence_parallel = false\n")
    assert main(["async-tp", str(job)]) == 2
    assert "without sequence parallelism" in capsys.readouterr().err
    job.write_text(job.read_text() + "expert_parallel_degree = 4\n")
    assert main(["async-tp", str(job)]) == 2
    assert (
        "tp 4, ep 4: with context, expert or pipeline parallelism some code of each block"
        in capsys.readouterr().err
    )


class NormedMLP(nn.Module):
    """An MLP with a norm inside its region and a factor after its last matrix product."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate_proj, self.up_proj = nn.Linear(16, 24, bias=False), nn.Linear(16, 24)
        self.down_proj = nn.Linear(24, 16, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)) * 0.5


class NormedPlan(TinyPlan):
    def mlp_plan(self, mlp):
        return {
            **self.mlp_region(),
            "norm": self.replicated_in_region(),
            "gate_proj": self.colwise(),
            "up_proj": self.colwise(),
            "down_proj": self.rowwise(reduce_output=False),
        }


def normed():
    model = Tiny()
    for block in model.layers:
        assert isinstance(block, Block)
        block.mlp = NormedMLP()
    return model


def test_the_operators_between_a_collective_and_its_product_are_named():
    decision = decide(
        Subject("own", make=normed, plan=NormedPlan),
        parse(["async-tp", "tests.support.tiny_model:normed"]),
        2,
        silent_progress,
    )
    assert not decision.complete
    verdicts = [v for blocks in decision.blocks for v in blocks.collectives]
    message = {v.obstacle for v in verdicts if not v.fused and not v.backward}
    assert message == {
        "mlp.norm, reshape between it and mlp.gate_proj, mlp.up_proj",
        "mul, reshape between it and mlp.down_proj",
    }


@needs_torch_2_13("older compilers make other graphs")
def test_a_graph_break_before_a_product_is_named_as_the_obstacle():
    config = modeling.load_config("transformer", "debug", num_hidden_layers=1, vocab_size=64)
    model = modeling.build_real(config, dtype=torch.float32)
    inputs = modeling.sample_inputs(config, batch_size=1, seq_len=80, seed=0)
    with fake_ranks(2) as mesh:
        apply_plan(model, mesh, loss_parallel=False)
        group, name = mesh.get_group().group_name, "model.layers.0"

        def run():
            model(**inputs).logits.sum().backward()

        with graphs_end_as_on_a_gpu():
            graphs = capture(model, [name], run, group, prepare_block)[name]
    # `prepare`, which switches fuse_swiglu off, is not called, so the MLP's last product is inside FLA's swiglu_linear.
    blocked = [v for graph in graphs for v in graph.verdicts if not v.hidden and v.possible]
    assert [(v.operation, v.backward) for v in blocked] == [("reduce_scatter", False), ("all_gather", True)]
    assert {v.obstacle for v in blocked} == {"a graph break separates it from its product"}
    block = model.get_submodule(name)
    assert block.mlp.fuse_swiglu is True
