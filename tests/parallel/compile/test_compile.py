"""Compile: the graphs that the compiler gets are counted, and compiled steps equal those of eager mode."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests import zoo
from tests.support import process_groups
from tests.support.refusals import refusal_or_none
from tests.support.tiny_model import TinyPlan, tiny_of
from titanplans.parallel import ActivationCheckpoint, Compile, FSDP2Config, ParallelError
from titanplans.parallel.activation_checkpoint import apply_activation_checkpointing
from titanplans.parallel.compile import apply_compile, compile_loss, compile_optimizer, one_graph_a_block

pytestmark = pytest.mark.thorough

TOKENS = torch.arange(32).reshape(2, 16)


def config(backend="aot_eager", **options):
    """Return the fields of `Compile` that apply_compile uses; the backend may be a counter."""
    unset = dict.fromkeys(("mode", "fullgraph", "dynamic", "options"))
    return SimpleNamespace(**unset | options, backend=backend)


class Counted(CompileCounterWithBackend):
    """aot_eager with counts of the graphs that it gets and of the runs of compiled code."""

    def __init__(self):
        super().__init__("aot_eager")
        self.runs = 0

    def __call__(self, graph, example_inputs):
        compiled = super().__call__(graph, example_inputs)

        def run(*args):
            self.runs += 1
            return compiled(*args)

        return run


def qwen3(layers=12):
    return zoo.build("qwen3", dtype=torch.float32, options=False, num_hidden_layers=layers)


def gla(layers=3):
    return zoo.build("gla", dtype=torch.float32, options=False, num_hidden_layers=layers)


def steps(model, optimizer=None, loss=None, count=3):
    """Return the losses of `count` training steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(count):
        logits = model(TOKENS).logits
        value = loss(logits) if loss else logits.square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("build", [tiny_of, qwen3])
def test_equal_blocks_are_compiled_once_and_train(build):
    backend, model = Counted(), build(6)
    apply_compile(model, config(backend), None)
    assert backend.frame_count == 0, "it is compiled when it first runs"
    # float32: the compiler decomposes some operators; a few epsilons (1.2e-7) over three steps.
    assert steps(model) == pytest.approx(steps(build(6)), rel=1e-5)
    assert backend.frame_count == 1
    assert backend.runs == 6 * 3, "every block of every step ran compiled code"
    assert not counters["graph_break"]
    assert list(model.state_dict()) == list(build(6).state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in build(6).named_parameters()]


def test_flash_linear_attention_breaks_graphs_at_its_own_kernels_only():
    frames = {}
    for layers in (1, 2):
        torch._dynamo.reset()
        backend, model = Counted(), gla(layers)
        assert not one_graph_a_block(model)
        apply_compile(model, config(backend), None)
        losses = steps(model, count=1)
        frames[layers] = backend.frame_count
    assert losses == pytest.approx(steps(gla(2), count=1), rel=1e-5)
    assert frames[2] == frames[1] > 1, "more blocks do not add graphs"
    assert counters["graph_break"]
    for reason in counters["graph_break"]:
        assert "calls a kernel of flash-linear-attention" in reason, reason


def test_blocks_without_those_kernels_stay_one_graph_each():
    model = tiny_of(1)
    model.layers.append(gla(1).model.layers[0])  # a hybrid: one block with FLA's kernels, one without
    apply_compile(model, config(), None)
    model.layers[0].mlp.register_forward_hook(lambda module, args, output: print(end=""))
    with pytest.raises(torch._dynamo.exc.Unsupported):  # print breaks a graph, which is an error here
        model(TOKENS)


def per_op(matmuls):
    return ActivationCheckpoint(mode="selective", selective_ac_option="op", per_op_sac_matmuls=matmuls)


def budget(fraction):
    return ActivationCheckpoint(mode="memory_budget", memory_budget=fraction)


FULL, MLP, EVERY_2ND = (ActivationCheckpoint(mode=mode) for mode in ("full", "mlp", "selective"))
POLICIES = [FULL, per_op("every second"), per_op("none"), MLP, EVERY_2ND, budget(0.0)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_checkpointing_in_a_compiled_block(policy):
    backend, model = Counted(), tiny_of(4)
    apply_activation_checkpointing(model, policy)
    apply_compile(model, config(backend), None)
    assert steps(model) == pytest.approx(steps(tiny_of(4)), rel=1e-5)
    assert backend.frame_count == (2 if policy is EVERY_2ND else 1)
    assert list(model.state_dict()) == list(tiny_of(4).state_dict())


def products_in_backward(policy):
    """Return the count of matrix products in the backward graph of a compiled block."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    counts = []

    def backward(graph, example_inputs):
        counts.append(
            sum(str(node.target).split(".")[-2:][0] in ("mm", "addmm") for node in graph.graph.nodes)
        )
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model = tiny_of(1)
    if policy is not None:
        apply_activation_checkpointing(model, policy)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,  # the partitioner of aot_eager and inductor
    )
    apply_compile(model, config(backend), None)
    steps(model, count=1)
    return counts[0]


def test_which_products_the_compiler_recomputes():
    before = torch._functorch.config.activation_memory_budget
    least = products_in_backward(None)
    again = {
        name: products_in_backward(policy) - least
        for name, policy in {
            "all kept": per_op("all"),
            "none kept": per_op("none"),
            "mlp": MLP,
            "budget 1": budget(1.0),
            "budget 0": budget(0.0),
        }.items()
    }
    # The backward needs the results of six products (of all but down_proj). The partitioner may keep some of them if that
    # does not make its minimal cut through the graph larger; it recomputes gate_proj and up_proj.
    assert again["all kept"] == again["budget 1"] == 0
    assert again["mlp"] == 2
    assert 2 < again["none kept"] <= 6
    assert 2 < again["budget 0"] <= 6
    assert torch._functorch.config.activation_memory_budget == before


def cross_entropy(logits):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())


def test_the_compiled_loss_is_used_in_training():
    backend, model = Counted(), tiny_of()
    expected = steps(tiny_of(), loss=cross_entropy)
    assert steps(model, loss=compile_loss(cross_entropy, config(backend))) == pytest.approx(
        expected, rel=1e-6
    )
    assert (backend.frame_count, backend.runs) == (1, 3)
    module = torch.nn.MSELoss()
    assert compile_loss(module, config()) is module
    assert module._compiled_call_impl is not None


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, foreach": (torch.optim.AdamW, dict(foreach=True, capturable=True)),
    "SGD with momentum": (torch.optim.SGD, dict(momentum=0.9)),
}


@pytest.mark.parametrize(
    ("name", "first"), [*((name, "compile") for name in OPTIMIZERS), ("AdamW", "scheduler")]
)
def test_the_compiled_step_is_used_in_training(name, first):
    cls, options = OPTIMIZERS[name]

    def run(backend):
        model = tiny_of(1)
        # One MLP, because each parameter adds some tens of operators to the optimizer's step.
        optimizer = cls(model.layers[0].mlp.parameters(), lr=0.1, **options)
        if not backend:  # without compile, capturable is allowed on an accelerator only
            optimizer.param_groups[0].update({key: False for key in ("capturable",) if key in options})

        def compiles():
            if backend:
                assert compile_optimizer(optimizer, config(backend)) is optimizer

        if first == "compile":
            compiles()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        if first == "scheduler":
            compiles()
        losses = []
        for _ in range(4):
            losses += steps(model, optimizer, count=1)
            scheduler.step()
        return losses

    backend = Counted()
    # AdamW divides by the gradient's size: if a gradient is only a rounding error, its step is arbitrary, too.
    assert run(backend) == pytest.approx(run(None), rel=1e-4)
    # SGD's first step has no momentum yet. The learning rate changes at every step without recompilation.
    assert backend.frame_count == (2 if cls is torch.optim.SGD else 1)
    assert backend.runs == 4


def step_of(**options):
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], **options)


REFUSED = {
    'compile.mode = "max-autotune": has no effect unless compile.backend': lambda: FSDP2Config(
        compile=Compile(enable=True, backend="eager", mode="max-autotune")
    ),
    "has no effect unless compile.backend": lambda: FSDP2Config(
        compile=Compile(enable=True, backend="eager", options={"a": 1})
    ),
    "compile.fullgraph = true, but model.layers.0": lambda: apply_compile(
        gla(1), config(fullgraph=True), None
    ),
    "kept from recomputation": lambda: apply_compile(applied("keep_mixer"), config(), None),
    "fused optimizer step": lambda: compile_optimizer(step_of(fused=True), config()),
    "only with capturable": lambda: compile_optimizer(step_of(foreach=True), config()),
}


def applied(mode):
    model = tiny_of()
    apply_activation_checkpointing(model, ActivationCheckpoint(mode=mode))
    return model


@pytest.mark.parametrize("message", REFUSED)
def test_compile_that_can_not_be_applied_is_refused(message):
    with pytest.raises(ParallelError, match=message):
        REFUSED[message]()


def test_options_reach_the_compiler():
    model = tiny_of(1)
    apply_compile(model, config(fullgraph=False), None)
    model.layers[0].mlp.register_forward_hook(lambda module, args, output: print(end=""))
    model(TOKENS)  # print breaks a graph, which is no error here
    assert counters["graph_break"]
    sizes = Counted()
    model = tiny_of(1)
    apply_compile(model, config(sizes, dynamic=True), None)
    for length in (5, 6, 7):
        model(TOKENS[:, :length])
    assert sizes.frame_count == 1, "one graph for all lengths"


UNDER_TP = {
    "attention and collectives kept": per_op("none"),
    "budget": budget(0.5),
}


LAYERS = 10  # more than the compilations of a kind of block


def compiled_under_tp(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from titanplans import apply_plan

    results = {}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))

    def parallel(policy, backend):
        model = tiny_of(LAYERS)
        apply_plan(model, mesh["tp"], plan=TinyPlan, loss_parallel=False)
        if policy is not None:
            apply_activation_checkpointing(model, policy)
        if backend is not None:
            apply_compile(model, config(backend), None)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["fsdp"])
        return fully_shard(model, mesh=mesh["fsdp"])

    expected = steps(parallel(None, None), count=2)
    for name, policy in UNDER_TP.items():
        torch._dynamo.reset()
        backend = Counted()
        results[name] = steps(parallel(policy, backend), count=2), backend.frame_count, backend.runs
    torch._dynamo.reset()
    results["full"] = refusal_or_none(
        lambda: steps(parallel(FULL, "aot_eager"), count=1), kind=AssertionError
    )
    torch._dynamo.reset()
    backend = Counted()
    for compiled in (False, True):
        model = parallel(None, None)
        optimizer = torch.optim.AdamW(model.layers[0].mlp.parameters(), lr=0.01)
        if compiled:
            compile_optimizer(optimizer, config(backend))
        results["optimizer", compiled] = steps(model, optimizer)
    results["optimizer"] = backend.frame_count, backend.runs
    torch._dynamo.reset()
    results["lengths"] = [gradients_of_several_lengths(mesh["tp"], compiled) for compiled in (False, True)]
    return expected, results


def gradients_of_several_lengths(mesh, compiled):
    """Return the gradients of an FLA model whose blocks are compiled inside their checkpoints."""
    from titanplans import apply_plan

    model = zoo.build("gla", options=False, num_hidden_layers=1)
    apply_plan(model, mesh, loss_parallel=False)
    if compiled:
        apply_activation_checkpointing(model, FULL)
        apply_compile(model, config(), None)
    sum(model(TOKENS[:, :length]).logits.sin().mean() for length in (16, 14)).backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


under_tp = process_groups.module_fixture(compiled_under_tp, 2)


@pytest.mark.parametrize("name", UNDER_TP)
def test_checkpointing_in_a_compiled_block_under_tp(under_tp, name):
    expected, results = under_tp
    losses, frames, runs = results[name]
    assert losses == pytest.approx(expected, rel=1e-5)
    # The stream begins in a hook of the first block. Under FSDP's hooks, it is a graph of its own, and all blocks share one.
    # If blocks are recomputed, the hook is recomputed with its block, and each block is compiled for itself.
    assert frames == (LAYERS if name.startswith("attention") else 2)
    assert runs == (LAYERS if name.startswith("attention") else 1 + LAYERS) * 2


def test_torch_can_not_compile_recomputed_attention_under_tp(under_tp):
    assert "DeviceMesh" in under_tp[1]["full"]


def test_forwards_of_several_lengths_are_recomputed_under_tp(under_tp):
    eager, compiled = under_tp[1]["lengths"]
    torch.testing.assert_close(compiled, eager)


def test_compiled_step_on_sharded_parameters(under_tp):
    results = under_tp[1]
    assert results["optimizer", True] == pytest.approx(results["optimizer", False], rel=1e-5)
    assert results["optimizer"] == (1, 3)
