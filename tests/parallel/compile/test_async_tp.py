"""Async tensor parallelism without a GPU: errors, the record of compiled graphs, the check.

Whether collectives are fused is decided on graphs (tests/cli/test_async_tp.py); fused kernels were never run here.
"""

import copy
import logging

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache, run_and_get_code

from titanplans import kernels, modeling
from titanplans.observe.graphs import install_record
from titanplans.parallel import Degrees, Mesh, ParallelError
from titanplans.parallel.compile import async_tp
from titanplans.parallel.compile.graph_breaks import end_graphs_at_kernels
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.split.border import Border
from titanplans.split.layout import StreamLayout
from titanplans.split.meshes import meshes_of
from titanplans.torch_private.compile import LAST_PASSES, custom_passes

RANKS, BATCH, TOKENS, WIDTH = 2, 2, 8, 16
FULL = BATCH * TOKENS * WIDTH * 4  # bytes


def region(border, x, up, down):
    """An MLP without activation, between the borders of its region."""
    return border.leave((border.enter(x) @ up) @ down)


@pytest.fixture
def mesh():
    with fake_ranks(RANKS):
        yield Mesh(Degrees(tp=RANKS), "cpu")


@pytest.fixture
def border(mesh):
    with fresh_cache():
        # The sequence comes first: gathers along another dimension need a C++ kernel that joins the shards.
        border = Border(meshes_of(mesh.get_mesh("tp")), StreamLayout(0))
        border.stream.length = TOKENS
        yield border
        torch._dynamo.reset()
        inductor.post_grad_custom_pre_pass = inductor.post_grad_custom_post_pass = None


def run(border):
    """Compile the region with inductor, and run forward and backward."""
    torch._dynamo.reset()
    x = torch.randn(TOKENS // RANKS, BATCH, WIDTH, requires_grad=True)
    up, down = (torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2))
    torch.compile(region, fullgraph=True)(border, x, up, down).sum().backward()


def test_the_collectives_of_compiled_graphs_are_recorded_with_their_bytes(border, mesh, caplog):
    """A hook of the user is kept; no collective is fused."""
    user_pass = UserPass()
    inductor.post_grad_custom_post_pass = user_pass
    with pytest.raises(ParallelError, match="inductor's graphs are not recorded"):
        async_tp.check_fused(mesh)
    record = install_record()
    assert install_record() is record
    run(border)
    assert custom_passes(LAST_PASSES) == (user_pass, record)
    assert user_pass.calls == len(record.graphs)
    assert [[(c.operation, c.phase) for c in graph] for graph in record.graphs] == [
        [("all_gather", phase), ("reduce_scatter", phase)] for phase in ("forward", "backward")
    ]
    collectives = record.collectives(tuple(range(RANKS)))
    assert len(collectives) == 4
    assert all(c.received == FULL // RANKS and not c.fused for c in collectives)
    assert record.collectives((5, 7)) == []
    with pytest.raises(ParallelError, match=r"none of 4 gathers .*in 2 compiled graphs"):
        async_tp.check_fused(mesh)
    with caplog.at_level(logging.WARNING):
        assert async_tp.check_fused(mesh, "warn") == (0, 0, 4)
    assert "titanplans async-tp names each obstacle" in caplog.text
    run(border)  # this compiles again, because dynamo was reset
    assert len(record.graphs) == 4, "all graphs are recorded, none comes from a compile cache"


def gated(border, x, gate, up, down):
    """An MLP of two products of the same gathered sequence, whose gradient is a sum."""
    gathered = border.enter(x)
    return border.leave(((gathered @ gate) * (gathered @ up)) @ down)


def test_inductor_schedules_products_between_a_scatter_and_its_wait(border):
    """This is checked in the code that inductor generates. Without the passes, the wait follows the collective
    immediately."""
    between = []
    for install in (lambda: None, async_tp.install_passes):
        torch._dynamo.reset()
        install()
        x = torch.randn(TOKENS // RANKS, BATCH, WIDTH, requires_grad=True)
        weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]
        compiled = torch.compile(gated, fullgraph=True)
        record = install_record()
        _, (_, backward) = run_and_get_code(lambda: compiled(border, x, *weights).sum().backward())  # noqa: B023
        body = backward[backward.rindex("def call(") :]
        start = body.index("reduce_scatter_tensor.default(")
        between.append(body[start : body.index("wait_tensor.default(", start)].count("mm("))
        kinds = {(c.operation, c.phase): c.overlapped for graph in record.graphs for c in graph}
        assert kinds["reduce_scatter", "backward"] == bool(between[-1])
    assert between == [0, 2]


def test_a_loop_of_the_user_is_checked_at_its_second_step(border, mesh):
    model = torch.nn.Linear(2, 2)
    async_tp.check_at_second_forward(model, mesh)
    install_record()
    x = torch.ones(1, 2)
    with torch.no_grad():
        model(x)
    model(x)
    with pytest.raises(ParallelError, match=r"no gather .*in 0 compiled graphs"):
        model(x)
    model(x)  # the warning is logged once


class UserPass(CustomGraphPass):
    def __init__(self):
        self.calls = 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return "own"


def test_prepared_blocks_of_fla_compute_the_same():
    kernels.install("cpu")
    config = modeling.load_config("gla", "debug", num_hidden_layers=1, hidden_size=64, vocab_size=64)
    original = modeling.build_real(config)
    prepared = copy.deepcopy(original)
    with torch._dynamo.config.patch(nested_graph_breaks=False):
        async_tp.prepare(prepared)
        (block,) = prepared.model.layers
        assert block.mlp.fuse_swiglu is False
        end_graphs_at_kernels(block)
        block.compile(backend="aot_eager")
        inputs = modeling.sample_inputs(config, batch_size=2, seq_len=80, seed=0)
        results = []
        for model in (original, prepared):
            logits = model(**inputs).logits
            logits.square().mean().backward()
            results.append((logits, *(p.grad for p in model.parameters())))
    torch._dynamo.reset()
    # float64: only the order of sums differs.
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)
