"""FSDP over real process groups: each option has its effect, and a step equals that of one process."""

import contextlib
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support import process_groups
from tests.support.operator_counts import OperatorCounts
from tests.support.refusals import refusal_or_none
from tests.support.step_comparison import full_copy
from tests.support.tiny_model import MLP, Block, Tiny, TinyPlan
from titanplans.parallel import FSDP2Config, ParallelError
from titanplans.parallel.fsdp import shard
from titanplans.parallel.fsdp.gradient_sync import accumulate, unsharded

pytestmark = pytest.mark.thorough

BATCH, LENGTH, LAYERS = 8, 8, 3
GATHER, SCATTER, REDUCE = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"
FSDP_MODULES = LAYERS + 2  # the embedding, the blocks, norm and head; the root module has no other parameters


class Tower(nn.Module):
    """A vision encoder before the decoder, for images [batch, tokens, 16]."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(16, 16)
        self.layers = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, images):
        x = self.patch(images)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Seeing(Tiny):
    """Tiny with images added to the embedding; without images the tower does not run."""

    def __init__(self):
        super().__init__()
        self.vision = Tower()

    def forward(self, input_ids, images=None):
        x = self.embed(input_ids)
        if images is not None:
            x = x + self.vision(images)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))


class AsDict(Tiny):
    def forward(self, input_ids):
        return {"logits": super().forward(input_ids).logits}


def build(kind="tiny"):
    torch.manual_seed(0)
    model = {"seeing": Seeing, "dict": AsDict}.get(kind, Tiny)(*([True] if kind == "tied" else []))
    model.layers = nn.ModuleList(Block() for _ in range(LAYERS))
    if kind == "frozen units":
        for module in (model.embed, model.layers[0], model.layers[2]):
            module.requires_grad_(False)
    # in every block all parameters but two biases are frozen and have another dtype, as under a low-rank adapter
    if kind == "frozen parts":
        for layer in model.layers:
            layer.requires_grad_(False).to(torch.float64)
            layer.attn.o_proj.bias = nn.Parameter(layer.attn.o_proj.bias.detach().float())
            layer.mlp.down_proj.bias = nn.Parameter(layer.mlp.down_proj.bias.detach().float())
    if kind == "dtypes":
        for layer in model.layers:
            layer.attn_norm.to(torch.float64)
            layer.mlp_norm.to(torch.float64)
        model.norm.to(torch.float64)
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 32, (BATCH, LENGTH), generator=generator), torch.randn(
        BATCH, LENGTH, 16, generator=generator
    )


def loss_of(model, tokens, images=None):
    out = model(tokens) if images is None else model(tokens, images)
    logits = out["logits"] if isinstance(out, dict) else out.logits
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="sum")
    return loss / (BATCH * LENGTH)


def collectives_of(calls):
    """Return the counts of collectives since the last call."""
    return {kind: count for kind, count in calls.take().items() if kind in (GATHER, SCATTER, REDUCE)}


@cache
def world(replicate=1, fsdp=4, tp=1):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        "cpu", (4 // replicate // fsdp // tp, replicate, fsdp, tp), mesh_dim_names=("x", "r", "f", "tp")
    )


def prepare(kind, replicate, fsdp, tp, options):
    model = build(kind)
    mesh = world(replicate, fsdp, tp)
    if tp > 1:
        from titanplans import apply_plan

        apply_plan(model, mesh["tp"], loss_parallel=False, plan=TinyPlan)
    units = shard(model, mesh["r", "f"] if replicate > 1 else mesh["f"], FSDP2Config(**options))
    ranks = replicate * fsdp
    rank = mesh["r"].get_local_rank() * fsdp + mesh["f"].get_local_rank()
    tokens, images = (t.chunk(ranks)[rank] for t in data())
    return model, units, tokens, images if kind == "seeing" else None


def outcome(model):
    gradients = {name: p.grad is not None and full_copy(p.grad) for name, p in model.named_parameters()}
    # SGD: AdamW's first step is the gradient's sign, which would hide a wrong scale.
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return gradients, {name: full_copy(p) for name, p in model.named_parameters()}


def one_step(kind="tiny", replicate=1, fsdp=4, tp=1, **options):
    model, _, tokens, images = prepare(kind, replicate, fsdp, tp, options)
    dtypes = {}
    model.layers[1].mlp.register_forward_hook(
        lambda module, args, out: dtypes.update(
            block=out.dtype, weight=full_copy(module.gate_proj.weight).dtype, device=out.device
        )
    )
    model.register_forward_hook(
        lambda module, args, out: dtypes.update(out=out["logits"].dtype if isinstance(out, dict) else None)
    )
    with OperatorCounts() as calls:
        loss = loss_of(model, tokens, images)
        forward = collectives_of(calls)
        loss.backward()
        backward = collectives_of(calls)
    stored = {p.dtype for p in model.parameters()}
    gradients, weights = outcome(model)
    return SimpleNamespace(
        forward=forward, backward=backward, gradients=gradients, weights=weights, seen=dtypes, stored=stored
    )


STEPS = {
    "default": dict(),
    "always": dict(fsdp_reshard_after_forward="always"),
    "never": dict(fsdp_reshard_after_forward="never"),
    "to 2 of 4": dict(fsdp_reshard_after_forward=2),
    "to 1 of 4": dict(fsdp_reshard_after_forward=1),
    "to 4 of 4": dict(fsdp_reshard_after_forward=4),
    "hsdp": dict(replicate=2, fsdp=2),
    "replicated": dict(replicate=4, fsdp=1),
    "tied": dict(kind="tied"),
    "offload": dict(enable_cpu_offload=True),
    "prefetch": dict(fsdp_forward_prefetch=2, fsdp_backward_prefetch=2),
    "prefetch, tied": dict(kind="tied", fsdp_forward_prefetch=1, fsdp_backward_prefetch=4),
    "prefetch, dtypes": dict(
        kind="dtypes", fsdp_forward_prefetch=2, fsdp_backward_prefetch=2, mixed_precision_param="float32"
    ),
    "frozen units, prefetch": dict(kind="frozen units", fsdp_forward_prefetch=1, fsdp_backward_prefetch=3),
    "frozen parts": dict(kind="frozen parts", mixed_precision_param="float32"),
    "tower, prefetch": dict(kind="seeing", fsdp_forward_prefetch=1, fsdp_backward_prefetch=1),
    "tower in the root": dict(kind="seeing", fsdp_towers="root"),
    "tp, prefetch": dict(tp=2, fsdp=2, fsdp_forward_prefetch=1, fsdp_backward_prefetch=2),
    "tp, offload": dict(tp=2, fsdp=2, enable_cpu_offload=True, kind="tied"),
    "bfloat16": dict(mixed_precision_param="bfloat16", mixed_precision_reduce="float32"),
    "bfloat16, one rank": dict(fsdp=1, mixed_precision_param="bfloat16", mixed_precision_reduce="float32"),
    "bfloat16 in, float32 out": dict(
        kind="dict",
        mixed_precision_param="bfloat16",
        mixed_precision_reduce="float32",
        mixed_precision_output="float32",
    ),
}


def in_batches(defer="all", micro=2, kind="tiny", replicate=1, fsdp=4, tp=1, keep_gathered=False, **options):
    """Run micro batches; return the collectives of each, and whether there were gradients after each."""
    model, _, tokens, _ = prepare(kind, replicate, fsdp, tp, options)
    counted, early, waits = [], [], []
    for i, micro_batch in enumerate(tokens.chunk(micro)):
        with (
            OperatorCounts() as calls,
            accumulate(model, last=i == micro - 1, defer=defer, keep_gathered=keep_gathered),
        ):
            loss_of(model, micro_batch).backward()
            waits += {last for *_, last in flags(model)}
        counted.append(collectives_of(calls))
        early.append(any(p.grad is not None for p in model.parameters()))
    after = flags(model)
    gradients, weights = outcome(model)
    return SimpleNamespace(
        counted=counted, early=early, waits=waits, gradients=gradients, weights=weights, flags=after
    )


def flags(model):
    return {
        (
            g.reduce_grads,
            g.all_reduce_grads,
            g.reshard_after_backward,
            m._get_fsdp_state()._state_ctx.is_last_backward,
        )
        for m in model.modules()
        if hasattr(m, "_get_fsdp_state") and (g := m._get_fsdp_state()._fsdp_param_group)
    }


BATCHES = {
    "all": dict(),
    "all, gathered": dict(keep_gathered=True),
    "all, gathered, never resharded": dict(keep_gathered=True, fsdp_reshard_after_forward="never"),
    "nothing": dict(defer="nothing"),
    "nothing, prefetched": dict(defer="nothing", fsdp_forward_prefetch=1, fsdp_backward_prefetch=1),
    "all, hsdp": dict(replicate=2, fsdp=2),
    "replicas, hsdp": dict(defer="replicas", replicate=2, fsdp=2),
    "all, tp": dict(tp=2, fsdp=2, kind="tied"),
    "all, tp, bfloat16": dict(
        tp=2, fsdp=2, mixed_precision_param="bfloat16", mixed_precision_reduce="float32"
    ),
}


def evaluation(reshard="default", fails=False, before=False, **options):
    """Run two forwards under `unsharded`, then a training step; return collectives, logits, and the step."""
    options |= dict(fsdp_reshard_after_forward=reshard)
    model, _, tokens, _ = prepare("tiny", 1, 4, 1, options)
    if before:
        loss_of(model, tokens).backward()
        model.zero_grad()
    with OperatorCounts() as calls:
        with contextlib.suppress(KeyError), unsharded(model):
            gathered = collectives_of(calls)
            logits = [model(tokens).logits, model(tokens).logits]
            inside = collectives_of(calls)
            if fails:
                handle = model.layers[2].register_forward_pre_hook(lambda *_: {}["a block that raises"])
                try:
                    model(tokens)
                finally:
                    handle.remove()
        sharded = all(isinstance(p, DTensor) for p in model.parameters())
        calls.take()
        loss = loss_of(model, tokens)
        forward = collectives_of(calls)
        loss.backward()
        backward = collectives_of(calls)
    gradients, weights = outcome(model)
    same = torch.equal(*logits) and not logits[0].requires_grad
    return SimpleNamespace(
        gathered=gathered, inside=inside, sharded=sharded, forward=forward, backward=backward, same=same,
        gradients=gradients, weights=weights,
    )  # fmt: skip


EVALUATIONS = {
    "default": dict(),
    "default, after a step": dict(before=True),
    "to 2 of 4": dict(reshard=2),
    "always": dict(reshard="always", before=True),
    "a forward that raises": dict(fails=True),
    "prefetched": dict(fsdp_forward_prefetch=1, fsdp_backward_prefetch=1),
}


def chains(**options):
    """Return, for each FSDP module, the names of the FSDP modules that it prefetches in the forward and in the
    backward."""
    model, *_ = prepare(options.pop("kind", "tiny"), 1, 4, 1, options)
    names = {}
    for name, module in model.named_modules():
        if hasattr(module, "_get_fsdp_state"):
            names.setdefault(id(module._get_fsdp_state()), name)
    prefetched = {}
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            prefetched[names[id(state)]] = tuple(
                [names[id(s)] for s in targets]
                for targets in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
            )
    return prefetched


def only_some_see():
    """Train with images on rank 0 alone; the tower is in the root module, so that all ranks gather it."""
    model, _, tokens, images = prepare("seeing", 1, 4, 1, dict(fsdp_towers="root"))
    sees = torch.distributed.get_rank() == 0
    loss_of(model, tokens, images if sees else None).backward()
    return outcome(model)


def only_some_see_units():
    """Do the same with the tower's blocks as FSDP modules, with FSDP and HSDP; return the errors of this rank."""
    errors = []
    for replicate, fsdp in ((1, 4), (2, 2)):
        model, _, tokens, images = prepare("seeing", replicate, fsdp, 1, dict())
        errors.append(
            refusal_or_none(loss_of, model, tokens, images if torch.distributed.get_rank() == 0 else None)
        )
        loss_of(model, tokens, None).backward()
        loss_of(model, tokens, images).backward()
    return errors


def groups_made(**options):
    groups = torch.distributed.distributed_c10d._world.pg_map
    before = len(groups)
    prepare("tiny", 1, 4, 1, options)
    return len(groups) - before


def all_cases(rank):
    return {
        **{("step", name): partial(one_step, **case) for name, case in STEPS.items()},
        **{("batches", name): partial(in_batches, **case) for name, case in BATCHES.items()},
        **{("evaluation", name): partial(evaluation, **case) for name, case in EVALUATIONS.items()},
        "chains": lambda: [
            chains(fsdp_forward_prefetch=2, fsdp_backward_prefetch=1),
            chains(kind="seeing", fsdp_forward_prefetch=1, fsdp_backward_prefetch=1),
        ],
        "only some": only_some_see,
        "only some, units": only_some_see_units,
        "groups": partial(groups_made, fsdp_reshard_after_forward=2),
        "refused": refused,
    }


results = process_groups.case_fixture(all_cases, 4)


def reference(kind, seeing=BATCH):
    model = build(kind)
    if kind in ("dtypes", "frozen parts"):
        model.float()
    tokens, images = data()
    if kind != "seeing":
        loss = loss_of(model, tokens)
    else:
        loss = loss_of(model, tokens[:seeing], images[:seeing])
        if seeing < BATCH:
            loss = loss + loss_of(model, tokens[seeing:])
    loss.backward()
    return outcome(model)


def assert_same_step(got, expected, low_precision=False):
    for ours, theirs in zip(got, expected, strict=True):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            if value is False:
                assert ours[name] is False, name
                continue
            # float32, sums of a few hundred terms in another order: some tens of epsilons (1.2e-7). bfloat16 has 8
            # bits: a gradient is off by a few 2^-8 of the largest element.
            rtol, atol = (5e-2, 5e-2 * value.abs().max().item()) if low_precision else (1e-4, 2e-6)
            torch.testing.assert_close(
                ours[name].float(), value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_that_of_one_process(name, results):
    kind = STEPS[name].get("kind", "tiny")
    step = results["step", name]
    assert_same_step((step.gradients, step.weights), reference(kind), "bfloat16" in name)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # The backward gathers what the forward freed: not the last block, norm and head.
        ("default", FSDP_MODULES, FSDP_MODULES - 2),
        ("always", FSDP_MODULES, FSDP_MODULES),
        ("never", FSDP_MODULES, 0),
        ("to 2 of 4", FSDP_MODULES, FSDP_MODULES - 2),
        ("to 1 of 4", FSDP_MODULES, 0),
        ("to 4 of 4", FSDP_MODULES, FSDP_MODULES - 2),
        ("prefetch", FSDP_MODULES, FSDP_MODULES - 2),
        ("hsdp", FSDP_MODULES, FSDP_MODULES - 2),
        ("replicated", 0, 0),
        ("tied", FSDP_MODULES - 1, LAYERS - 1),
        ("bfloat16, one rank", 0, 0),
    ],
)
def test_count_of_gathers(name, forward, backward, results):
    step = results["step", name]
    assert step.forward.get(GATHER, 0) == forward
    assert step.backward.get(GATHER, 0) == backward


def test_count_of_reductions(results):
    calls = {name: results["step", name].backward for name in STEPS}
    assert calls["default"] == {GATHER: FSDP_MODULES - 2, SCATTER: FSDP_MODULES}
    assert calls["hsdp"][SCATTER] == calls["hsdp"][REDUCE] == FSDP_MODULES
    assert calls["replicated"] == {REDUCE: FSDP_MODULES}
    # Embedding and two blocks are frozen.
    assert calls["frozen units, prefetch"][SCATTER] == FSDP_MODULES - 3
    assert calls["bfloat16, one rank"] == {}


def test_mixed_precision_inside_and_outside_of_modules(results):
    for name in ("bfloat16", "bfloat16, one rank", "bfloat16 in, float32 out"):
        step = results["step", name]
        assert step.seen["block"] == step.seen["weight"] == torch.bfloat16
        assert step.stored == {torch.float32}
    assert results["step", "bfloat16 in, float32 out"].seen["out"] == torch.float32
    assert results["step", "default"].seen["block"] == torch.float32


def test_dtypes_stay_as_stored(results):
    assert results["step", "prefetch, dtypes"].stored == {torch.float32, torch.float64}
    # the norms of a block are one FSDP module, the last norm another
    assert results["step", "prefetch, dtypes"].forward[GATHER] == FSDP_MODULES + LAYERS + 1
    assert results["step", "frozen parts"].stored == {torch.float32, torch.float64}
    assert results["step", "frozen parts"].forward[GATHER] == FSDP_MODULES


@pytest.mark.parametrize("name", BATCHES)
def test_accumulated_gradients_equal_those_of_one_batch(name, results):
    got = results["batches", name]
    assert_same_step(
        (got.gradients, got.weights), reference(BATCHES[name].get("kind", "tiny")), "bfloat16" in name
    )
    assert got.flags == {(True, True, True, True)}
    micro = BATCHES[name].get("micro", 2)
    assert got.waits == [*[False] * (micro - 1), True], "only the last backward waits for its reductions"


def test_reductions_wait_for_the_last_micro_batch(results):
    calls = {name: results["batches", name].counted for name in BATCHES}
    assert SCATTER not in calls["all"][0]
    assert calls["all"][1][SCATTER] == FSDP_MODULES
    assert not results["batches", "all"].early[0]
    assert calls["nothing"][0][SCATTER] == calls["nothing"][1][SCATTER] == FSDP_MODULES
    assert [c[GATHER] for c in calls["nothing"]] == [
        2 * FSDP_MODULES - 2
    ] * 2  # no FSDP module of an earlier forward is prefetched
    assert not {SCATTER, REDUCE} & set(calls["all, hsdp"][0])
    assert calls["all, hsdp"][1][SCATTER] == calls["all, hsdp"][1][REDUCE] == FSDP_MODULES
    assert calls["replicas, hsdp"][0][SCATTER] == calls["replicas, hsdp"][1][SCATTER] == FSDP_MODULES
    assert REDUCE not in calls["replicas, hsdp"][0]
    assert calls["replicas, hsdp"][1][REDUCE] == FSDP_MODULES


def test_kept_gathered_saves_the_second_forwards_gathers(results):
    calls = {name: results["batches", name].counted for name in BATCHES}
    assert [c[GATHER] for c in calls["all"]] == [2 * FSDP_MODULES - 2] * 2
    # Kept after the backward, but freed between forward and backward and gathered again.
    assert [c[GATHER] for c in calls["all, gathered"]] == [2 * FSDP_MODULES - 2, FSDP_MODULES - 2]
    assert [c.get(GATHER, 0) for c in calls["all, gathered, never resharded"]] == [FSDP_MODULES, 0]


@pytest.mark.parametrize("name", EVALUATIONS)
def test_unsharded_gathers_once_and_restores(name, results):
    got = results["evaluation", name]
    assert got.gathered == {GATHER: FSDP_MODULES}
    assert got.inside == {}
    assert got.same
    assert got.sharded
    always = EVALUATIONS[name].get("reshard") == "always"
    assert got.forward == {GATHER: FSDP_MODULES}
    assert got.backward[GATHER] == (FSDP_MODULES if always else FSDP_MODULES - 2)
    assert_same_step((got.gradients, got.weights), reference("tiny"))


def test_all_fsdp_modules_reshard_over_the_same_groups(results):
    assert results["groups"] == 2  # one for sharding, one for replication


def test_prefetch_chains(results):
    two, seeing = results["chains"]
    blocks = [f"layers.{i}" for i in range(LAYERS)]
    order = ["embed", *blocks, "norm"]
    assert {name: forward for name, (forward, _) in two.items()} == {
        "": order[:2],
        **{name: order[i + 1 : i + 3] for i, name in enumerate(order)},
    }
    assert {name: backward for name, (_, backward) in two.items()} == {
        "": ["norm"],
        **{name: order[max(i - 1, 0) : i] for i, name in enumerate(order)},
    }
    # A batch may have no images, so nothing outside of the tower gathers the tower.
    assert seeing["vision.layers.0"] == (["vision.layers.1"], [])
    assert seeing["vision.layers.1"] == ([], ["vision.layers.0"])
    assert seeing["layers.0"] == (["layers.1"], ["embed"])


def test_ranks_without_images_join_the_sum(results):
    assert_same_step(results["only some"], reference("seeing", seeing=BATCH // 4))


def test_images_on_some_ranks_only_are_refused(results):
    message = 'fsdp_towers = "blocks": some ranks\' batches have images'
    assert [error.startswith(message) for error in results["only some, units"]] == [True, True]


REFUSED = {
    "layers.0.mlp.up_proj.weight and layers.1.mlp.up_proj.weight are one parameter": dict(kind="shared"),
    "layers.0.mlp.up_proj.weight is float64, layers.0.mlp.up_proj.bias is float32": dict(kind="one module"),
    "FSDP over a mesh of 3 dimensions": dict(fsdp=None),
    "defer = 'replicas', but": dict(call=lambda m: accumulate(m, last=False, defer="replicas")),
    "defer = 'some'": dict(call=lambda m: accumulate(m, last=False, defer="some")),
    "Linear is not sharded by FSDP": dict(call=lambda m: unsharded(m.layers[0].mlp.up_proj)),
    "FSDPBlock is a module inside a sharded model": dict(call=lambda m: unsharded(m.layers[0])),
}  # fmt: skip


def refused():
    return {expected: refusal(**case) for expected, case in REFUSED.items()}


def refusal(kind="tiny", fsdp=4, call=None):
    """Return the error, and whether the parameters are unchanged."""
    model = build(kind)
    if kind == "shared":
        model.layers[0].mlp.up_proj.weight = model.layers[1].mlp.up_proj.weight
    if kind == "one module":
        module = model.layers[0].mlp.up_proj
        module.weight = nn.Parameter(module.weight.detach().double())
    mesh = world(fsdp=fsdp)["f"] if fsdp else world()["r", "f", "tp"]

    def attempt():
        shard(model, mesh, FSDP2Config())
        if call is not None:
            model(data()[0])
            with call(model):
                pass

    message = refusal_or_none(attempt, kind=ParallelError) or ""
    return message, call is not None or not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("expected", REFUSED)
def test_options_are_refused_before_anything_is_sharded(expected, results):
    message, untouched = results["refused"][expected]
    assert message.startswith(expected)
    assert "\n" not in message
    assert untouched
