"""The parallelism report equals formulas, a proof's count of the plan's collectives, and the compiler's counters."""

import json
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch._C._dynamo.eval_frame import set_guard_complete_hook
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests import zoo
from tests.support import process_groups
from tests.support.tiny_model import TinyPlan, tiny_of
from titanplans.observe.recorder import record_collectives
from titanplans.observe.summary import after_step, at_start
from titanplans.observe.tracker import fsdp_units
from titanplans.parallel import DDPConfig, Degrees, FSDP2Config, ParallelError, ParallelManager

pytestmark = pytest.mark.thorough

TOKENS = torch.arange(32).reshape(2, 16)
LAYERS = 3
STREAM = TOKENS.numel() * 16 * 4
"""The bytes of Tiny's hidden states in float32. A gather or scatter over two ranks sends half of them to each rank."""

TP, DATA = Degrees(tp=2), Degrees(dp_shard=2)
FULL = {"mode": "full"}


def compiled(backend="eager", **options):
    """Return compile options. The default backend runs dynamo's graphs eagerly, which is enough for these tests."""
    return {"enable": True, "backend": backend, "components": ["model"], **options}


CASES = {
    "tp": (FSDP2Config(plan=TinyPlan), TP),
    "tp, recomputed": (FSDP2Config(plan=TinyPlan, activation_checkpoint=FULL), TP),
    "tp, aot_eager": (FSDP2Config(plan=TinyPlan, compile=compiled("aot_eager")), TP),
    "tp, inductor": (FSDP2Config(plan=TinyPlan, compile=compiled("inductor")), TP),
    "fsdp": (FSDP2Config(), DATA),
    "fsdp, bfloat16": (FSDP2Config(mixed_precision_param="bfloat16", mixed_precision_reduce="float32"), DATA),
    "fsdp, prefetch": (FSDP2Config(fsdp_forward_prefetch=2, fsdp_backward_prefetch=2, activation_checkpoint=FULL), DATA),
    "hsdp": (FSDP2Config(), Degrees(dp_replicate=2)),
    "ddp": (DDPConfig(), Degrees(dp_replicate=2, dp_shard=1)),
}  # fmt: skip


def gla():
    return zoo.build("gla", dtype=torch.float32, options=False, num_hidden_layers=2)


def prepared(config, degrees, build=lambda: tiny_of(LAYERS)):
    torch._dynamo.reset()
    counters.clear()
    manager = ParallelManager(config, degrees)
    model = manager.parallelize(build())
    return manager, model, torch.optim.SGD(model.parameters(), lr=0.5)


def step(manager, model, optimizer):
    loss = manager.cross_entropy(model(TOKENS).logits, TOKENS)
    loss.backward()
    norm = manager.clip_gradients(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def code_around_the_model(model):
    """Return everything but the model's code that runs in a step: hooks, dispatch modes and replaced methods."""

    def of(owner):
        hooks = {key: len(value) for key, value in vars(owner).items() if key.endswith("_hooks")}
        attributes = {
            key: value.__qualname__ for key, value in vars(owner).items() if hasattr(value, "__qualname__")
        }
        return hooks, attributes, type(owner).__qualname__

    modules = {name: of(module) for name, module in model.named_modules()}
    units = {name: of(unit) for name, unit in fsdp_units(model)}
    parameters = {name: len(p._backward_hooks or ()) for name, p in model.named_parameters()}
    guard_hook = set_guard_complete_hook(None)
    set_guard_complete_hook(guard_hook)
    modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    return modules, units, parameters, modes, guard_hook


def trained(config, degrees, measured: bool):
    """Train two steps and perhaps measure the first one.

    Return losses and norms, the report, the graphs after each step, and the code around the model.
    """
    manager, model, optimizer = prepared(config, degrees)
    report = manager.parallelism_report()
    values, graphs = [], []
    for index in range(2):
        if measured and index == 0:
            with report.measuring(1):
                values.append(step(manager, model, optimizer))
        else:
            values.append(step(manager, model, optimizer))
        graphs.append(counters["stats"]["unique_graphs"])
    return values, report.values, graphs, code_around_the_model(model)


def count_by_proof():
    """Return the collectives that a proof's recorder counts for the plan alone, by operation and direction."""

    from titanplans import apply_plan

    manager = ParallelManager(FSDP2Config(), TP)
    model = tiny_of(LAYERS)
    apply_plan(model, manager.mesh.get_mesh("tp"), plan=TinyPlan)
    with record_collectives(model) as record:
        manager.cross_entropy(model(TOKENS).logits, TOKENS).backward()
    return sorted((c.operation, c.phase == "backward", c.received) for c in record.collectives)


def fused_operators():
    """Record the operators of async tensor parallelism on meta tensors, because they have no kernel on a CPU."""
    import torch.distributed._symmetric_memory  # registers the operators

    manager, model, _ = prepared(FSDP2Config(plan=TinyPlan), TP)
    name = manager.mesh.get_mesh("tp").get_group().group_name
    shard, weight = torch.empty(8, 16, device="meta"), torch.empty(16, 24, device="meta")
    with record_collectives(model) as record:
        torch.ops.symm_mem.fused_all_gather_matmul(shard, [weight, weight], 0, name)
        torch.ops.symm_mem.fused_matmul_reduce_scatter(shard, weight, "sum", 0, name)
    return [(c.operation, c.group, c.fused, c.received) for c in record.collectives]


def failing(graph, example_inputs):
    raise ValueError("boom")


def drop(model):
    model.layers[1]._compiled_call_impl = None


def differ(model):
    """Make the blocks differ, and compile them with torch itself, which only warns at its recompile limit."""
    for index, layer in enumerate(model.layers):
        layer.compile(backend="eager")
        layer.mlp.register_forward_hook(lambda module, args, output, factor=index: output * factor)


def uncompilable(model):
    layer = model.layers[2]
    layer.forward = torch.compiler.disable(layer.forward)


@contextmanager
def nothing():
    yield


def eager_cases():
    """Return reasons why a compiled block runs eagerly: the backend, dynamo's settings or stance, a changed model."""
    patch = torch._dynamo.config.patch
    loose = compiled(fullgraph=False)
    return {
        "switched off": (loose, lambda: patch(disable=True), None),
        "stance": (loose, lambda: torch.compiler.set_stance("force_eager"), None),
        "suppressed": (compiled("failing", fullgraph=False), lambda: patch(suppress_errors=True), None),
        "limit": (loose, lambda: patch(recompile_limit=1, fail_on_recompile_limit_hit=False), differ),
        "marked": (loose, nothing, uncompilable),
    }


def outside_the_blocks():
    """Return the number of graphs outside of blocks if the compiled loss is used, and the error if it is not used."""
    config = FSDP2Config(compile=compiled() | {"components": ["model", "loss"]})
    manager, model, optimizer = prepared(config, DATA)
    loss = manager.prepare_loss(manager.cross_entropy)
    report = manager.parallelism_report()
    with report.measuring(1):
        loss(model(TOKENS).logits, TOKENS, TOKENS.numel()).backward()
    manager, model, optimizer = prepared(config, DATA)
    with pytest.raises(ParallelError) as error, manager.parallelism_report().measuring(1):
        step(manager, model, optimizer)
    return report.values["graphs"]["outside_blocks"], str(error.value)


def eager_errors():
    torch._dynamo.register_backend(failing, name="failing")
    errors = {}
    for name, (options, setting, change) in eager_cases().items():
        manager, model, optimizer = prepared(FSDP2Config(compile=options), DATA)
        if change is not None:
            change(model)
        with setting(), pytest.raises(ParallelError) as error, manager.parallelism_report().measuring(1):
            step(manager, model, optimizer)
        errors[name] = str(error.value)
    for name in ("lost before", "lost later"):
        manager, model, optimizer = prepared(FSDP2Config(compile=compiled()), DATA)
        report = None if name == "lost before" else manager.parallelism_report()
        drop(model)
        with pytest.raises(ParallelError) as error, (report or manager.parallelism_report()).measuring(1):
            step(manager, model, optimizer)
        errors[name] = str(error.value)
    return errors


def unknown_operator():
    """Measure a step with an unknown operator.

    Return whether the step's results are the same, the report's null fields, whether the code around the model is the same,
    and the logged lines.
    """
    case = FSDP2Config(plan=TinyPlan, compile=compiled()), TP, lambda: tiny_of(1)
    manager, model, optimizer = prepared(*case)
    expected, path = step(manager, model, optimizer), code_around_the_model(model)
    manager, model, optimizer = prepared(*case)
    with mock.patch("titanplans.observe.operators._OPERATIONS", {}):
        report = manager.parallelism_report()
        with report.measuring(1):
            same = step(manager, model, optimizer) == expected
    step(manager, model, optimizer)  # the checks of the first forward run only without a dispatch mode
    values = report.values
    json.dumps(values)
    null = {field for field in values["reasons"] if values[field] is None}
    lines = [*values["reasons"].values(), *at_start(values), *after_step(values)]
    return same, null, code_around_the_model(model) == path, lines


def failing_step():
    """Return whether a step that runs out of memory leaves the same hooks on the model whether it is measured or not."""

    def out_of_memory(module, args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    paths = []
    for measured in (False, True):
        manager, model, optimizer = prepared(FSDP2Config(plan=TinyPlan), TP)
        report = manager.parallelism_report()
        model.layers[1].mlp.register_forward_pre_hook(out_of_memory)
        with pytest.raises(torch.OutOfMemoryError), report.measuring(1) if measured else nothing():
            step(manager, model, optimizer)
        paths.append(code_around_the_model(model))
    return paths[0] == paths[1]


def on_two_ranks(rank):
    results = {}
    for name, (config, degrees) in CASES.items():
        plain = trained(config, degrees, measured=False)
        values, report, graphs, path = trained(config, degrees, measured=True)
        results[name] = {
            "report": report,
            "same": (values, graphs) == (plain[0], plain[2]),
            "graphs": graphs,
            "clean": path == plain[3],
            "learns": values[-1][0] < values[0][0],
        }
    results["proof"], results["fused"] = count_by_proof(), fused_operators()
    manager, model, optimizer = prepared(FSDP2Config(plan=TinyPlan), TP)
    with record_collectives(model) as record:
        for _ in range(2):  # micro batches
            manager.cross_entropy(model(TOKENS).logits, TOKENS).backward()
        manager.clip_gradients(1.0)
        record.places.log_begins()
        torch.distributed.all_reduce(torch.zeros(4))
    results["two"] = list(record.collectives)
    config = FSDP2Config(compile=compiled(), activation_checkpoint=FULL)
    manager, model, optimizer = prepared(config, TP, gla)
    report = manager.parallelism_report()
    with report.measuring(1):
        step(manager, model, optimizer)
    results["gla"] = report.values, counters["stats"]["unique_graphs"], counters["graph_break"].total()
    results["outside"] = outside_the_blocks()
    results["eager"] = eager_errors()
    results["unknown operator"] = unknown_operator()
    results["clean after a failing step"] = failing_step()
    return results


two_ranks = process_groups.module_fixture(on_two_ranks, 2)


def collectives_of(report, module=None):
    """Return the table of the last block, or of `module`, as {(phase, operation, group): (count, bytes)}."""
    tables = {name: kind for kind in report["blocks"] for name in kind["names"]}
    tables |= {table["name"]: table for table in report["other_modules"]}
    rows = tables[f"layers.{LAYERS - 2}" if module is None else module]["collectives"]
    return {(row["phase"], row["operation"], row["group"]): (row["count"], row["bytes"]) for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_measuring_does_not_change_a_run_and_leaves_no_state(two_ranks, case):
    actual = two_ranks[case]
    assert actual["same"], "losses, norms and graphs after each step are the same"
    assert actual["learns"]
    assert actual["clean"], "hooks, modes and wrapped functions are removed"
    assert len(set(actual["graphs"])) == 1, "nothing is recompiled after the recording"
    json.dumps(actual["report"])


@pytest.mark.parametrize("case", ["tp", "tp, aot_eager", "tp, inductor"])
def test_a_block_under_tp_gathers_and_scatters_the_stream_twice_each_way(two_ranks, case):
    stream = (2, STREAM)  # two collectives, half of each is received
    actual = collectives_of(two_ranks[case]["report"])
    # Gradients of the two norms of a block and of q_norm are reduced over the ranks in the backward.
    replicated = actual.pop(("backward", "all_reduce", "tp"))
    assert actual == {
        (phase, operation, "tp"): stream
        for phase in ("forward", "backward")
        for operation in ("all_gather", "reduce_scatter")
    }
    assert replicated[0] > 0


def test_counts_equal_those_of_a_proof_and_of_compiled_blocks(two_ranks):
    proof = two_ranks["proof"]
    for case in ("tp", "tp, aot_eager", "tp, inductor"):
        report = two_ranks[case]["report"]
        everything = [*report["blocks"], *report["other_modules"]]
        for phase, backward in (("forward", False), ("backward", True)):
            actual = Counter()
            for part in everything:
                for row in part["collectives"]:
                    # With FSDP2 the backward sums the gradients of replicated parameters; without FSDP2 they stay Partial.
                    if row["phase"] == phase and (not backward or row["operation"] != "all_reduce"):
                        actual[row["operation"], "count"] += row["count"] * len(part.get("names", [0]))
                        actual[row["operation"], "bytes"] += row["bytes"] * len(part.get("names", [0]))
            expected = Counter()
            for operation, back, size in proof:
                if back is backward and (not backward or operation != "all_reduce"):
                    expected[operation, "count"] += 1
                    expected[operation, "bytes"] += size
            assert actual == expected
            assert expected["all_gather", "count"] >= 2 * LAYERS
        assert report["step"]["by_group"].keys() == {"tp"}
        assert report["step"]["fused"] == 0


def test_recomputed_collectives_are_counted_separately(two_ranks):
    plain, again = (collectives_of(two_ranks[case]["report"]) for case in ("tp", "tp, recomputed"))
    forward = {key: value for key, value in plain.items() if key[0] == "forward"}
    assert {key: value for key, value in again.items() if key[0] == "recomputed"} == {
        ("recomputed", *key[1:]): value for key, value in forward.items()
    }
    assert {key: value for key, value in again.items() if key[0] != "recomputed"} == plain
    assert two_ranks["tp, recomputed"]["report"]["recomputation"]["blocks"] == LAYERS


BLOCK = sum(parameter.numel() for parameter in tiny_of(1).layers[0].parameters())


@pytest.mark.parametrize(
    ("case", "gathered", "reduced"), [("fsdp", 4, 4), ("fsdp, bfloat16", 2, 4), ("fsdp, prefetch", 4, 4)]
)
def test_an_fsdp_module_gathers_twice_and_reduces_once(two_ranks, case, gathered, reduced):
    # Half of the parameters are received, and a little more, because shards are padded to full rows.
    actual = collectives_of(two_ranks[case]["report"])
    assert {key: count for key, (count, _) in actual.items()} == {
        ("forward", "all_gather", "fsdp"): 1,
        ("backward", "all_gather", "fsdp"): 1,
        ("backward", "reduce_scatter", "fsdp"): 1,
    }
    for (_, operation, _), (_, size) in actual.items():
        width = gathered if operation == "all_gather" else reduced
        assert size == pytest.approx(BLOCK * width / 2, rel=0.02)
    last = collectives_of(two_ranks[case]["report"], f"layers.{LAYERS - 1}")
    assert ("backward", "all_gather", "fsdp") not in last, (
        "the backward needs it immediately, so it stays gathered"
    )


def test_replicas_sum_their_gradients(two_ranks):
    everything = sum(parameter.numel() for parameter in tiny_of(LAYERS).parameters())
    hsdp = collectives_of(two_ranks["hsdp"]["report"])
    assert hsdp == {("backward", "all_reduce", "dp_replicate"): (1, BLOCK * 4)}
    # One bucket, which belongs to no single module.
    others = {part["name"]: part["collectives"] for part in two_ranks["ddp"]["report"]["other_modules"]}
    backward = [row for row in others[None] if row["phase"] == "backward"]
    assert [(row["count"], row["bytes"]) for row in backward] == [(1, everything * 4)]
    assert all(not kind["collectives"] for kind in two_ranks["ddp"]["report"]["blocks"])


def test_fused_operators_count_as_their_collectives(two_ranks):
    # The other rank's shard of 8 x 16, and half of the product of 8 x 24, in float32.
    assert two_ranks["fused"] == [
        ("all_gather", (0, 1), True, 8 * 16 * 4),
        ("reduce_scatter", (0, 1), True, 4 * 24 * 4),
    ]


def test_micro_batches_are_added_and_reductions_for_the_log_are_separate(two_ranks):
    collectives = two_ranks["two"]
    report = two_ranks["tp"]["report"]["step"]
    assert sum(c.phase == "forward" for c in collectives) == 2 * report["by_phase"]["forward"]["collectives"]
    assert (
        sum(c.phase == "backward" for c in collectives) == 2 * report["by_phase"]["backward"]["collectives"]
    )
    assert sum(c.phase == "update" for c in collectives) == report["by_phase"]["update"]["collectives"]
    # An all-reduce of four floats over two ranks receives half of them twice.
    assert [(c.operation, c.received) for c in collectives if c.phase == "log"] == [("all_reduce", 16)]


def test_compiled_graphs_equal_the_counters_of_the_compiler(two_ranks):
    report = two_ranks["tp, aot_eager"]["report"]
    (kind,) = report["graphs"]["blocks"]
    assert (report["compile"]["blocks"], report["compile"]["of"], kind["ran_compiled"]) == (
        LAYERS,
        LAYERS,
        LAYERS,
    )
    assert kind["graphs"] == two_ranks["tp, aot_eager"]["graphs"][0]
    assert kind["graph_breaks"] == kind["recompilations"] == 0
    report, graphs, breaks = two_ranks["gla"]
    (kind,) = report["graphs"]["blocks"]
    assert kind["class"] == "GLABlock"
    assert (kind["graphs"], kind["graph_breaks"], kind["ran_compiled"]) == (graphs, breaks, 2)
    assert min(graphs, breaks) > 1, "kernels are outside of every graph"
    assert sum(kind["break_reasons"].values()) == breaks
    assert kind["left_eager"] == []


def test_a_compiled_loss_that_is_not_used_is_an_error(two_ranks):
    graphs, error = two_ranks["outside"]
    assert graphs == 1
    assert error.startswith("compile.components has loss, but outside the blocks 0 graphs")


WHY = {
    "switched off": ("layers.0 was to be compiled, but ran eagerly", "TORCH_COMPILE_DISABLE"),
    "stance": ("layers.0 was to be compiled, but ran eagerly", "a stance"),
    "suppressed": (
        "layers.0 was to be compiled, but ran eagerly",
        "backend='failing' raised: ValueError: boom",
    ),
    "limit": ("layers.1 was to be compiled, but ran eagerly", "recompile limit"),
    "marked": ("layers.2 was to be compiled, but ran eagerly", "torch.compiler.disable"),
    "lost before": ("layers.1 was to be compiled, but has no compiled call", "after"),
    "lost later": ("layers.1 was to be compiled, but ran eagerly", "never called"),
}


@pytest.mark.parametrize("name", WHY)
def test_a_compiled_block_that_ran_eagerly_is_an_error(two_ranks, name):
    error = two_ranks["eager"][name]
    assert all(message in error for message in WHY[name]), error
    assert "\n" not in error


def test_an_unknown_operator_does_not_end_the_run(two_ranks):
    same, null, clean, lines = two_ranks["unknown operator"]
    assert same, "loss and norm are bit-identical"
    assert null == {"step", "blocks", "other_modules", "graphs"}
    assert clean, "hooks, modes and wrapped functions are removed"
    assert any("is not in the table of operators, so its bytes can't be counted" in line for line in lines)


def test_a_failure_of_the_step_is_raised(two_ranks):
    assert two_ranks["clean after a failing step"]


def test_the_report_as_log_lines(two_ranks):
    report = two_ranks["tp, aot_eager"]["report"]
    (where, what, waits), (first, *_) = at_start(report), after_step(report)
    assert waits.startswith("compiling blocks with aot_eager in the first step")
    assert "fsdp2 on 2 ranks, tp 2 (gloo); applied in order: tensor parallelism, compile, FSDP2" in where
    assert "TinyPlan with sequence parallel and loss parallel" in what
    assert f"compiled by aot_eager: {LAYERS} of {LAYERS} blocks" in what
    assert f"{report['step']['collectives']} collectives" in first
    assert any(f"{LAYERS} of {LAYERS} Blocks ran compiled" in line for line in after_step(report))
