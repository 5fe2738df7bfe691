"""The passes of async tensor parallelism fuse and reorder the operators of a block's graphs; results stay the same.

Each graph of a block runs on a CPU with the same values, before and after all passes. Fused operators are run by torch's
functions for any device, and collectives in the same way as `capture` runs them.
"""

import copy

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed._symmetric_memory as symmetric
from torch._inductor.custom_graph_pass import CustomGraphPass

from tests import zoo
from titanplans import apply_plan
from titanplans.cli.async_tp import graphs_end_as_on_a_gpu, prepare_block
from titanplans.observe.chains import name_of, operation, overlapped, wait_of
from titanplans.observe.fusible import _OneRank, capture
from titanplans.parallel.compile import async_tp
from titanplans.proof.ranks.fake import fake_ranks

pytestmark = pytest.mark.thorough

BLOCK = "model.layers.0"
FUSED = ("all_gather_matmul", "matmul_reduce_scatter")


class Hook(CustomGraphPass):
    """Collects a copy of each graph."""

    def __init__(self):
        self.kept = []

    def __call__(self, graph):
        self.kept.append(copy.deepcopy(graph.owning_module))

    def uuid(self):
        return None


class Alone(_OneRank):
    """Uses the functions that torch has for devices without symmetric memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for name in FUSED:
            if func is getattr(torch.ops.symm_mem, f"fused_{name}").default:
                with self:
                    return getattr(symmetric, f"_fused_{name}_fallback")(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def graphs(name):
    """Return the graphs of a block before and after the passes."""
    # Recording router logits breaks a graph.
    experts = dict(output_router_logits=False, mlp_only_layers=[]) if name == "qwen2_moe" else {}
    model = zoo.build(name, dtype=torch.float32, options=False, num_hidden_layers=1, **experts)
    before, after = Hook(), Hook()

    def install():
        async_tp.install_passes()
        inductor.post_grad_custom_pre_pass = [before, *inductor.post_grad_custom_pre_pass]
        inductor.post_grad_custom_post_pass = [*inductor.post_grad_custom_post_pass, after]

    with fake_ranks(2) as mesh, graphs_end_as_on_a_gpu():
        apply_plan(model, mesh, loss_parallel=False)
        async_tp.prepare(model)
        # More than 64 tokens, because FLA's mixers use another kernel for up to 64 tokens.
        inputs = zoo.inputs(name, batch_size=1, seq_len=80)
        capture(
            model,
            [BLOCK],
            lambda: model(**inputs).logits.sum().backward(),
            mesh.get_group().group_name,
            prepare_block,
            install,
        )
        yield from zip(before.kept, after.kept, strict=True)


def values(module):
    """Yield values for the inputs of a graph. Integers are indices; index 0 always exists."""
    generator = torch.Generator().manual_seed(0)
    for node in module.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        if not isinstance(fake, torch.Tensor):
            yield fake
        elif fake.dtype.is_floating_point:
            value = torch.randn(fake.shape, generator=generator).abs() + 0.1
            yield torch.empty_strided(fake.shape, fake.stride()).copy_(value)
        else:
            yield torch.zeros(fake.shape, dtype=fake.dtype)


@pytest.mark.parametrize("name", ["qwen3", "gla", "qwen2_moe"])
def test_fused_and_overlapped_graphs_compute_the_same(name):
    names = []
    for before, after in graphs(name):
        inputs = list(values(before))
        with _OneRank():
            expected = before(*inputs)
        with Alone():
            actual = after(*inputs)
        for ours, theirs in zip(actual, expected, strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
        names += [name_of(node) for node in after.graph.nodes]
        for start in after.graph.nodes:
            if operation(start) and name_of(start) == "reduce_scatter_tensor" and overlapped(start):
                names.append("overlapped")
                assert wait_of(start).target is torch.ops.higher_order.control_deps, (
                    "and inductor keeps it so"
                )
    assert {"fused_all_gather_matmul", "fused_matmul_reduce_scatter", "overlapped"} <= set(names)
