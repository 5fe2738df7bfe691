"""ParallelManager: a user's loop trains as in one process under each strategy, and wrong calls are refused."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support import process_groups
from tests.support.refusals import refusal, refusal_or_none
from tests.support.step_comparison import full_copy
from tests.support.tiny_batches import MICRO, ROWS, batches, build
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans.parallel import (
    DDPConfig,
    Degrees,
    FSDP2Config,
    MegatronFSDPConfig,
    ParallelManager,
    process_group,
    read_strategy,
)

pytestmark = pytest.mark.thorough

CASES = {
    "fsdp2": (FSDP2Config(), Degrees()),
    "tp x fsdp": (FSDP2Config(plan=TinyPlan), Degrees(tp=2)),
    "fsdp2, kept gathered": (FSDP2Config(fsdp_keep_gathered=True), Degrees()),
    "from toml": (
        read_strategy('strategy = "fsdp2"\n[activation_checkpoint]\nmode = "mlp"\n'),
        Degrees(dp_replicate=2, dp_shard=2),
    ),
    "fsdp2, an optimizer made before": (FSDP2Config(), Degrees(), True),
    "tp, an optimizer made before": (FSDP2Config(plan=TinyPlan), Degrees(tp=4), True),
    "tp x fsdp, an optimizer made before": (FSDP2Config(plan=TinyPlan), Degrees(tp=2), True),
    "cp x fsdp": (FSDP2Config(plan=TinyPlan), Degrees(cp=2)),
    "ddp": (DDPConfig(), None),
    "ddp, an optimizer made before": (DDPConfig(), None, True),
}


def plain():
    """Train in one process; return losses, norms and weights."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for tokens, labels in zip(*batches(), strict=True):
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "norms": norms, "weights": model.state_dict(), "eval": evaluate(model)}


def evaluate(model):
    with torch.no_grad():
        return full_copy(model(batches()[0][0]).logits)


def train(config, degrees, early=False):
    """Train as `plain` does, over all ranks; with `early`, the optimizer is built before the model is parallelised."""
    manager = ParallelManager(config, degrees, device_type="cpu")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = manager.parallelize(model)
    optimizer = manager.prepare_optimizer(
        optimizer if early else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    loss_of = manager.prepare_loss(manager.cross_entropy)
    dp = manager.mesh.get_mesh("dp")
    mine = slice(dp.get_local_rank() * ROWS // dp.size(), (dp.get_local_rank() + 1) * ROWS // dp.size())
    losses, norms = [], []
    for tokens, labels in zip(*batches(), strict=True):
        tokens, labels = tokens[mine].chunk(MICRO), labels[mine].chunk(MICRO)
        count = manager.count_tokens(torch.stack(labels))
        total = torch.zeros((), dtype=torch.float64)
        for i in range(MICRO):
            with manager.accumulate(last=i == MICRO - 1):
                loss = loss_of(model(tokens[i]).logits, labels[i], count)
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total, group=manager.mesh.get_mesh("loss").get_group())
        norms.append(manager.clip_gradients(0.5))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with manager.evaluation():
        assert not model.training
        logits = evaluate(model)
    assert model.training
    weights = {name: full_copy(tensor) for name, tensor in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights, "eval": logits}


def refused(config, degrees=None, model=build, use=lambda manager, model: None):
    manager = ParallelManager(config, degrees, device_type="cpu")
    use(manager, manager.parallelize(model()))


def on_meta():
    with torch.device("meta"):
        return Tiny()


def tokens_of(manager, model):
    model(batches()[0][0])


def twice(manager, model):
    ParallelManager(FSDP2Config(), device_type="cpu").parallelize(model)


REFUSED = {
    "is already sharded": (FSDP2Config(), None, build, twice),
    "config = dict: give FSDP2Config": ({}, None),
    "degrees = dict: give Degrees": (FSDP2Config(), {"tp": 1}),
    "model is a str": (FSDP2Config(), None, lambda: "model"),
    "temperature has no dimension": (FSDP2Config(), None, lambda: with_scalar_parameter()),
    'autocast_dtype = "float32": on a CPU': (FSDP2Config(autocast_dtype="float32"), None),
    "embed.weight is on meta and the mesh on cpu": (
        DDPConfig(activation_checkpoint={"mode": "full"}), None, lambda: on_meta(),
    ),
    "ranks hold different values of embed.weight": (FSDP2Config(), None, lambda: build(seed=dist.get_rank())),
    "ranks hold different values of layers.0.scale:": (FSDP2Config(), None, lambda: with_buffer(dist.get_rank())),
    "still on meta": (FSDP2Config(), None, on_meta, tokens_of),
    "already has a model": (FSDP2Config(), None, build, lambda m, model: m.parallelize(build())),
    "call parallelize(model) first": (
        FSDP2Config(), None, build, lambda m, model: ParallelManager(FSDP2Config(), device_type="cpu").accumulate(),
    ),
    "set dp_shard to 1 and dp_replicate to 4": (DDPConfig(), Degrees()),
    "megatron_fsdp needs CUDA": (MegatronFSDPConfig(), None),
    "one label for each position": (
        FSDP2Config(), None, build, lambda m, model: m.cross_entropy(model(batches()[0][0]).logits, batches()[1][0, :, 1:]),
    ),
}  # fmt: skip


def with_scalar_parameter():
    model = build()
    model.temperature = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    return model


def with_buffer(value):
    model = build()
    model.layers[0].register_buffer("scale", torch.full((3,), float(value)))
    return model


def abandoned(how, **options):
    """Return the gradient norm of a step after an abandoned step, and of the same step without the abandoned step."""
    norms = []
    for is_abandoned in (True, False):
        manager = ParallelManager(FSDP2Config(**options), Degrees(dp_replicate=2), device_type="cpu")
        model = manager.parallelize(build())
        tokens, labels = (x[0] for x in batches())
        if is_abandoned:
            try:
                with manager.accumulate(last=False):
                    manager.cross_entropy(model(tokens).logits, labels).backward()
                    if how == "exception":
                        raise KeyError("a bad batch")
            except KeyError:
                pass
            else:
                manager.forget_gradients()
        with manager.accumulate():
            manager.cross_entropy(model(tokens).logits, labels).backward()
        norms.append(manager.clip_gradients(1.0))
    return norms


def modes():
    """Return which modules are in training mode in and after an evaluation; one was in evaluation mode before."""
    manager = ParallelManager(FSDP2Config(), device_type="cpu")
    model = manager.parallelize(build())
    model.layers[0].eval()
    with manager.evaluation():
        inside = [module.training for module in model.modules()]
    return any(inside), model.training, model.layers[0].training, model.layers[1].training


def between_forward_and_backward():
    """Return the full parameters between forward and backward, when they are resharded to two ranks."""
    manager = ParallelManager(FSDP2Config(fsdp_reshard_after_forward=2), device_type="cpu")
    model = manager.parallelize(build())
    model(batches()[0][0])
    return {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def all_cases(rank):
    return {
        **{name: partial(train, *case) for name, case in CASES.items()},
        "abandoned": lambda: {
            (how, defer): abandoned(how, defer_fsdp_grad_sync=defer)
            for how in ("exception", "forgotten")
            for defer in ("all", "replicas", "nothing")
        },
        "modes": modes,
        "resharded": between_forward_and_backward,
        "refused": lambda: {expected: refusal_or_none(refused, *case) for expected, case in REFUSED.items()},
    }


results = process_groups.case_fixture(all_cases, 4)


@pytest.mark.parametrize("name", CASES)
def test_a_loop_trains_as_in_one_process(name, results):
    expected, got = plain(), results[name]
    # float64. AdamW's first step divides each gradient by itself: if a gradient is near 0, an error of 1e-16 becomes 1e-9.
    torch.testing.assert_close(torch.stack(got["losses"]), torch.stack(expected["losses"]), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        torch.stack(got["norms"]).double(), torch.stack(expected["norms"]), rtol=1e-6, atol=0
    )
    assert got["weights"].keys() == expected["weights"].keys()
    torch.testing.assert_close(got["weights"], expected["weights"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got["eval"], expected["eval"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("expected", REFUSED)
def test_wrong_calls_are_refused_in_one_line(expected, results):
    message = results["refused"][expected] or ""
    assert expected in message
    assert "\n" not in message


def test_an_abandoned_step_leaves_no_gradient(results):
    for case, (after, alone) in results["abandoned"].items():
        torch.testing.assert_close(after, alone, rtol=1e-12, atol=0, msg=lambda m, case=case: f"{case}: {m}")


def test_evaluation_restores_the_mode_of_each_module(results):
    assert results["modes"] == (False, True, False, True)


def test_parameters_resharded_to_some_ranks_keep_their_values(results):
    expected = dict(build().named_parameters())
    assert len(results["resharded"]) > 4
    for name, value in results["resharded"].items():
        assert value.equal(expected[name])


def test_one_process_without_torchrun():
    with process_group("cpu"):
        got = train(FSDP2Config(), None)
    torch.testing.assert_close(torch.stack(got["losses"]), torch.stack(plain()["losses"]), rtol=1e-9, atol=0)


def test_loss_and_optimizer_step_are_compiled_if_the_strategy_says_so():
    torch._dynamo.reset()
    options = {"enable": True, "components": ["loss", "optimizer"]}
    with process_group("cpu"):
        manager = ParallelManager(FSDP2Config(compile=options | {"backend": "eager"}), device_type="cpu")
        model = manager.parallelize(build())
        optimizer = manager.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        loss_of = manager.prepare_loss(manager.cross_entropy)
        before = {name: full_copy(p) for name, p in model.named_parameters()}
        tokens, labels = (x[0] for x in batches())
        loss_of(model(tokens).logits, labels).backward()
        expected = {name: before[name] - 0.01 * full_copy(p.grad) for name, p in model.named_parameters()}
        frames = torch._dynamo.utils.counters["frames"]["ok"]
        optimizer.step()
        assert frames >= 1
        assert torch._dynamo.utils.counters["frames"]["ok"] > frames
        got = {name: full_copy(p) for name, p in model.named_parameters()}
    # A compiled step takes the learning rate as float32.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tp=2), Degrees(dp_replicate=2, dp_shard=1)])
def test_muon_of_torch_is_refused_for_sharded_weights(degrees):
    with process_groups.fake_group(2):
        plan = TinyPlan if degrees.tp > 1 else None
        manager = ParallelManager(FSDP2Config(plan=plan), degrees, device_type="cpu")
        model = manager.parallelize(build())
        muon = torch.optim.Muon([model.layers[0].mlp.up_proj.weight])
        if degrees.dp_replicate == 2:
            assert manager.prepare_optimizer(muon) is muon
        else:
            message = refusal(manager.prepare_optimizer, muon)
            assert message.startswith(
                "torch.optim.Muon orthogonalises a sharded weight by DTensor matrix products"
            )
            assert message.endswith('use titanplans.parallel.build_optimizers(model, Optimizer(name="Muon"))')
