"""DDP over real process groups: each option reaches the reducer, and a step equals that of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

from tests.support import process_groups
from tests.support.operator_counts import OperatorCounts
from tests.support.refusals import refusal
from tests.support.step_comparison import unwrapped_name
from tests.support.tiny_model import Block, Tiny, TinyPlan
from titanplans.config import DDPConfig
from titanplans.parallel import ParallelError
from titanplans.parallel.activation_checkpoint import apply_activation_checkpointing
from titanplans.parallel.compile import apply_compile
from titanplans.parallel.ddp import accumulate, apply_ddp

RANKS, BATCH, LENGTH, LAYERS = 2, 8, 8, 4


class AsDict(Tiny):
    """A model that returns a dict, in which torch finds the tensors. One block is optional, and one bias is never used."""

    def __init__(self):
        super().__init__()
        self.sometimes = Block()
        self.never = nn.Parameter(torch.zeros(16))

    def forward(self, input_ids, extra=True):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        if extra:
            x = self.sometimes(x)
        return {"logits": self.lm_head(self.norm(x))}


class Wide(Tiny):
    """A model whose blocks are larger than a bucket of 1 MiB."""

    def widen(self):
        for layer in self.layers:
            torch.manual_seed(2)
            layer.mlp.gate_proj, layer.mlp.up_proj = nn.Linear(16, 8192), nn.Linear(16, 8192)
            layer.mlp.down_proj = nn.Linear(8192, 16)


class Counting(Tiny):
    """A model that counts its forwards in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids):
        self.seen += 1 + dist.get_rank() if dist.is_initialized() else 1
        return super().forward(input_ids)


def build(cls=Tiny, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = cls()
    model.layers = nn.ModuleList(Block() for _ in range(LAYERS))
    if cls is Wide:
        model.widen()
    return model.to(dtype)  # float64, so that the order of sums makes no visible difference


def data(sequences=slice(None)):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (BATCH, LENGTH), generator=generator)
    labels = tokens.masked_fill(torch.rand(BATCH, LENGTH, generator=generator) < 0.3, -100)
    # The ranks have different counts of tokens, so the mean of the ranks' losses differs from the mean over all tokens.
    labels[: BATCH // 2, 2:] = -100
    return tokens[sequences], labels[sequences], (labels != -100).sum()


def loss_of(model, sequences=slice(None), **kwargs):
    tokens, labels, count = data(sequences)
    out = model(tokens, **kwargs)
    logits = (out["logits"] if isinstance(out, dict) else out.logits).to(torch.float64)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def mine(rank, index=0, micro_batches=1):
    """Return the slice of the rank's sequences, or of one of its micro batches."""
    sequences = BATCH // RANKS // micro_batches
    return slice(rank * BATCH // RANKS + index * sequences, rank * BATCH // RANKS + (index + 1) * sequences)


def gradients(model):
    return {
        unwrapped_name(name): None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def prepared(config, cls=Tiny, seed=0):
    # autocast does not apply to float64
    model = build(cls, seed, torch.float64 if config.autocast_dtype is None else torch.float32)
    apply_activation_checkpointing(model, config.activation_checkpoint)
    if config.compile.blocks:
        apply_compile(model, config.compile, None)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    apply_ddp(model, mesh, config)
    return model


def step(rank, options, cls=Tiny, steps=1, **kwargs):
    """Return gradients and count of all-reduces of the last of `steps`, and the weights after it."""
    model = prepared(DDPConfig(**options), cls, seed=rank)  # rank 0's values have to be broadcast
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, mine(rank), **kwargs)
        # the counter is not active in the forward, which would not be compiled under a dispatch mode
        with OperatorCounts() as sums:
            loss.backward()
        optimizer.step()
    return gradients(model), sums.of("allreduce_"), {n: t.clone() for n, t in model.state_dict().items()}


CASES = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 0.005},
    "bucket view": {"gradient_as_bucket_view": True},
    "full": {"activation_checkpoint": {"mode": "full"}},
    "compiled, full": {
        "compile": {"enable": True, "backend": "aot_eager"},
        "activation_checkpoint": {"mode": "full"},
    },
}
UNUSED = {
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True, "defer_grad_sync": False},
    "static, full, view": {
        "static_graph": True,
        "defer_grad_sync": False,
        "activation_checkpoint": {"mode": "full"},
        "gradient_as_bucket_view": True,
    },
    "unused, selective": {
        "find_unused_parameters": True,
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    },
}
ACCUMULATED = {
    "default": {},
    "static": {"static_graph": True, "defer_grad_sync": False},
    "bucket view": {"gradient_as_bucket_view": True},
    "each, default": {"defer_grad_sync": False},
    "each, bucket view": {"defer_grad_sync": False, "gradient_as_bucket_view": True},
}


def all_cases(rank):
    # Two steps: a static graph is recorded in the first, and buckets are rebuilt before the second.
    return {
        **{name: partial(step, rank, options) for name, options in CASES.items()},
        "buckets": lambda: [step(rank, CASES[case], steps=2)[1] for case in ("default", "small buckets")],
        **{name: partial(step, rank, options, AsDict, steps=2) for name, options in UNUSED.items()},
        "a rank without": partial(step, rank, UNUSED["unused"], AsDict, extra=rank == 0),
        **{
            f"accumulated, {name}": partial(accumulated, rank, options)
            for name, options in ACCUMULATED.items()
        },
        "graphs": lambda: {split: graphs(rank, split) for split in (False, True)},
        "autocast": lambda: step(rank, {"autocast_dtype": "bfloat16"})[0],
        "buffers": lambda: {flag: buffers(rank, flag) for flag in (False, True)},
        "refusals": refusals,
        "names": names,
    }


def accumulated(rank, options):
    config = DDPConfig(**options)
    model = prepared(config, AsDict if config.static_graph else Tiny)
    for _ in range(2):
        model.zero_grad()
        with OperatorCounts() as sums:
            for index in range(2):
                with accumulate(model, last=index == 1, defer=config.defer_grad_sync):
                    loss_of(model, mine(rank, index, 2)).backward()
    return gradients(model), sums.of("allreduce_"), None


def graphs(rank, split):
    """Return the count of graphs of equal blocks that are larger than a bucket, and the gradients."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = build(Wide)
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    options = {"bucket_cap_mb": 1, "split_compiled_blocks": split, "compile": {"enable": True}}
    apply_ddp(model, mesh, DDPConfig(**options))
    loss_of(model, mine(rank)).backward()
    return counter.frame_count, gradients(model)


def buffers(rank, flag):
    model = build(Counting)
    model.seen.fill_(10.0 * (rank + 1))
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    apply_ddp(model, mesh, DDPConfig(broadcast_buffers=flag))
    for _ in range(3):
        loss_of(model, mine(rank)).backward()
    with torch.no_grad():
        model(data()[0])  # not in training: no communication
    by_rank = [torch.zeros_like(model.seen) for _ in range(RANKS)]
    dist.all_gather(by_rank, model.seen)
    return [float(value) for value in by_rank]


def names():
    reducer = prepared(
        DDPConfig(bucket_cap_mb=3.5, gradient_as_bucket_view=True, find_unused_parameters=True), AsDict
    )
    torch_ddp = replicate.state(reducer)._ddp_weakref()
    return {
        "parameters": [name for name, _ in reducer.named_parameters()],
        "state": list(reducer.state_dict()),
        "options": (
            torch_ddp.bucket_bytes_cap,
            torch_ddp.gradient_as_bucket_view,
            torch_ddp.find_unused_parameters,
            torch_ddp.static_graph,
        ),
        "static": replicate.state(prepared(DDPConfig(static_graph=True, defer_grad_sync=False), AsDict))
        ._ddp_weakref()
        .static_graph,
    }


def split(model, line):
    from titanplans import apply_plan

    apply_plan(model, line, loss_parallel=False, plan=TinyPlan)


def deferred(model, line):
    apply_ddp(model, line, STATIC)
    with accumulate(model, last=False):
        pass


def run(model, line, config):
    """Run a model whose output is an object in which torch finds no tensors."""
    apply_ddp(model, line, config)
    loss_of(model)


STATIC = DDPConfig(static_graph=True, defer_grad_sync=False)
LOOKED_FOR = DDPConfig(find_unused_parameters=True)
REFUSALS = {
    "tp": (split, "use FSDP2Config with dp_shard = 1 and dp_replicate"),
    "fsdp": (
        lambda model, line: torch.distributed.fsdp.fully_shard(model, mesh=line),
        "use FSDP2Config with dp_shard = 1 and dp_replicate",
    ),
    "meta": (lambda model, line: model.to("meta"), "embed.weight"),
    "twice": (lambda model, line: apply_ddp(model, line, DDPConfig()), "already replicated"),
    "frozen": (lambda model, line: model.requires_grad_(False), "all parameters are frozen"),
    "whole": (lambda model, line: model.compile(), "compile its blocks one by one"),
    "wrapped": (lambda model, line: torch.compile(model), "compile its blocks one by one"),
    "deferred": (deferred, "defer gradients"),
    "hidden, unused": (lambda model, line: run(model, line, LOOKED_FOR), "a SimpleNamespace"),
    "hidden, static": (lambda model, line: run(model, line, STATIC), "a SimpleNamespace"),
}
"""A change of the model that prevents replication, and a fragment of the error."""


def refusals():
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("x", "dp"))

    def replicated(name, model):
        result = REFUSALS[name][0](model, mesh["dp"])
        to_replicate = result if isinstance(result, nn.Module) else model
        apply_ddp(to_replicate, mesh["dp"], DDPConfig())

    return {name: refusal(replicated, name, build(), kind=ParallelError) for name in REFUSALS}


results = process_groups.case_fixture(all_cases, RANKS)


def reference(cls=Tiny, steps=1, **kwargs):
    model = build(cls)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, **kwargs).backward()
        optimizer.step()
    return gradients(model), model.state_dict()


def check(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        # float64: only the order of sums differs, some 1e-16 for values around 1
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-12) if value is not None else None
        assert (actual[name] is None) == (value is None), name


@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_that_of_one_process(results, case):
    grads, _, weights = results[case]
    expected, after = reference()
    check(grads, expected)
    check(weights, after)


@pytest.mark.parametrize("case", UNUSED)
def test_unused_parameters(results, case):
    grads, _, weights = results[case]
    expected, after = reference(AsDict, steps=2)
    if (
        "static" in case
    ):  # a static graph gives unused parameters gradients of zero, which SGD without momentum ignores
        assert grads["never"] is None or not grads["never"].any()
        expected["never"] = grads["never"]
    check(grads, expected)
    check(weights, after)


def test_parameters_that_only_one_rank_uses(results):
    grads, _, _ = results["a rank without"]
    model = build(AsDict)
    loss_of(model, mine(0)).backward()
    loss_of(model, mine(1), extra=False).backward()
    check(grads, gradients(model))


@pytest.mark.parametrize("case", [f"accumulated, {name}" for name in ACCUMULATED])
def test_accumulated_gradients_equal_those_of_the_full_batch(results, case):
    grads, sums, _ = results[case]
    cls = AsDict if "static" in case else Tiny
    expected, _ = reference(cls)
    if "static" in case:
        expected["never"] = grads["never"]
    check(grads, expected)
    assert sums == (1 if ACCUMULATED[case.removeprefix("accumulated, ")].get("defer_grad_sync", True) else 2)


def test_the_bucket_size_limits_an_all_reduce(results):
    # the all-reduces of the second step are counted: torch uses one bucket until the first step has ended
    default, small = results["buckets"]
    sizes = [p.numel() * p.element_size() for p in build().parameters()]
    assert default == 1  # 80 KB
    # A bucket ends with the tensor that fills it, so it is larger than the limit by less than a tensor.
    cap = 0.005 * 2**20
    assert sum(sizes) / (cap + max(sizes)) <= small <= sum(sizes) / cap + 1


def test_equal_blocks_are_one_graph_unless_buckets_split_them(results):
    one_graph, split = results["graphs"][False], results["graphs"][True]
    assert one_graph[0] == 1  # one graph for all blocks
    assert split[0] > 1
    for _, grads in (one_graph, split):
        check(grads, reference(Wide)[0])


def test_autocast_computes_in_its_dtype_and_keeps_the_parameters(results):
    grads = results["autocast"]
    model = build(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        tokens, labels, count = data()
        logits = model(tokens).logits
    assert logits.dtype == torch.bfloat16
    loss = (
        nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum") / count
    )
    loss.backward()
    exact = reference()[0]
    for name, value in gradients(model).items():
        assert grads[name].dtype == torch.float32
        # Both compute in bfloat16: each product is rounded by up to 0.5%, and sums have another order.
        torch.testing.assert_close(grads[name], value, rtol=0.02, atol=0.02 * float(value.abs().max()))
    assert any(not torch.allclose(grads[name].double(), exact[name], rtol=1e-4) for name in exact)


def test_buffers_are_broadcast_from_rank_0_once_or_in_each_forward(results):
    # the counter starts at rank 0's value, 10; each forward adds 1 on rank 0 and 2 on rank 1
    assert results["buffers"][False] == [14.0, 18.0]
    # the last forward in training began with rank 0's value, 12; the forward after it was not in training, so nothing was
    # sent
    assert results["buffers"][True] == [14.0, 16.0]


def test_names_are_unchanged_and_options_reach_torch(results):
    model = build(AsDict)
    assert results["names"]["parameters"] == [name for name, _ in model.named_parameters()]
    assert results["names"]["state"] == list(model.state_dict())
    assert results["names"]["options"] == (3.5 * 2**20, True, True, False)
    assert results["names"]["static"]


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_value_and_the_remedy(results, case):
    assert REFUSALS[case][1] in results["refusals"][case]


def test_accumulate_needs_ddp():
    with pytest.raises(ParallelError, match="call apply_ddp first"), accumulate(build(), last=True):
        pass
