"""The collectives of split models equal the published bounds, in blocks, embedding, head and loss.

For plans that are correct but wasteful, the superfluous collectives and their modules are named.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)

from tests import zoo
from tests.support.faulty_styles import installed
from tests.support.tiny_model import Tiny, TinyPlan, changed
from titanplans import Degrees, PlanError, TPOptions, apply_plan, modeling, registered_plans
from titanplans.observe.communication import Communication, count_communication
from titanplans.observe.recorder import record_collectives
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.split.local_code import HeadRanks
from titanplans.styles.base import Site
from titanplans.styles.region import Region

BATCH, SEQUENCE = 2, 16


class Case(NamedTuple):
    """A model of two blocks, and its plan if this is not the registered one."""

    name: str
    build: Callable[[], nn.Module]
    plan: type | None = None
    hidden: int = 64
    vocabulary: int = 512


def build(name: str, **options) -> nn.Module:
    return zoo.build(name, dtype=torch.float32, options=False, vocab_size=512, **options)


CASES = [
    Case("transformer", partial(build, "transformer", qk_norm=True, num_kv_heads=4, qkv_bias=True)),
    Case("transformer, tied", partial(build, "transformer", tie_word_embeddings=True, fuse_swiglu=False)),
    Case("gla", partial(build, "gla", use_short_conv=True)),
    Case("gla, hybrid", partial(build, "gla", attn=dict(layers=[1], num_heads=8, num_kv_heads=4))),
    *(
        Case(name, partial(build, name))
        for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3")
    ),
    Case("tiny", Tiny, TinyPlan, hidden=16, vocabulary=32),
]


pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture
def loss_of_trainer():
    """Return torchtitan's vocabulary-parallel cross entropy, set up as the trainer does."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend

    before = get_spmd_backend()
    set_spmd_backend("partial_dtensor")
    yield cross_entropy_loss
    set_spmd_backend(before)


def torch_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def step(model: nn.Module, tokens: torch.Tensor, loss=torch_loss) -> None:
    logits = model(input_ids=tokens, use_cache=False).logits
    with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
        loss(logits, tokens).backward()


def token_ids(model: nn.Module, sequence: int = SEQUENCE) -> torch.Tensor:
    size = getattr(model.config, "vocab_size", 32)
    return torch.randint(0, size, (BATCH, sequence), generator=torch.Generator().manual_seed(1))


def count(
    build: Callable[[], nn.Module],
    options: TPOptions,
    plan=None,
    *,
    judged=None,
    loss=torch_loss,
    world=fake_ranks,
    sequence=SEQUENCE,
) -> Communication:
    """Return the communication of a model, compared with the bound for the options `judged` (default: `options`)."""
    with world(options.degrees.tp) as mesh:
        model = build()
        applied = apply_plan(
            model,
            mesh,
            plan=plan,
            loss_parallel=options.loss_parallel,
            sequence_parallel=options.sequence_parallel,
        )
        run = partial(step, model, token_ids(model, sequence), loss)
        return count_communication(model, applied, run, judged or options)


def issued(communication: Communication, part: str, direction: str) -> Counter:
    return Counter((c.operation, c.elements) for c in communication.of(part, direction))


CHOICES = [TPOptions(Degrees(tp=2), *o) for o in itertools.product((True, False), (True, False))]
"""The number of collectives does not depend on the degree. One model shows this at degree 4, where ranks share heads."""
GRID = [(case, options) for case in CASES for options in CHOICES]
GRID += [(CASES[0], replace(options, degrees=Degrees(tp=4))) for options in CHOICES]


def test_every_registered_plan_is_counted():
    names = {case.name for case in CASES}
    shipped = {
        name for name, plan in registered_plans().items() if plan.__module__.startswith("titanplans.plans.")
    }
    assert names >= shipped - zoo.BESIDES


@pytest.mark.parametrize(
    ("case", "options"), GRID, ids=lambda value: value.name if isinstance(value, Case) else str(value)
)
def test_every_collective_is_needed(case, options):
    communication = count(case.build, options, case.plan)
    assert communication.minimal, communication.lines()
    stream, logits = BATCH * SEQUENCE * case.hidden, BATCH * SEQUENCE * case.vocabulary

    # The collectives are written out, so that this test does not depend on the bound that is tested above.
    blocks = communication.decoder.names
    assert len(blocks) == 2
    two = {("all_gather", stream): 2, ("reduce_scatter", stream): 2}
    if not options.sequence_parallel:
        two = {("all_reduce", stream): 2}
    for block in blocks:
        assert issued(communication, block, "forward") == two
        assert issued(communication, block, "backward") == two

    head = {("all_gather", stream): 1} if options.sequence_parallel else {}
    if not options.loss_parallel:
        head |= {("all_gather", logits): 1}
    assert issued(communication, "head", "forward") == head
    expected = "reduce_scatter" if options.sequence_parallel else "all_reduce"
    assert issued(communication, "head", "backward") == {(expected, stream): 1}
    reductions = {("all_reduce", BATCH * SEQUENCE): 3} if options.loss_parallel else {}
    assert issued(communication, "loss", "forward") == reductions
    assert not communication.of("loss", "backward")

    # Only blocks, embedding, head and loss communicate.
    assert set(communication.parts) == {*blocks, "embedding", "head", "loss"}
    embedded = issued(communication, "embedding", "forward")
    backward = issued(communication, "embedding", "backward")
    if options.sequence_parallel:
        assert embedded in ({("all_reduce", stream): 1}, {("reduce_scatter", stream): 1})
        assert backward == {("all_gather", stream): 1}
    else:
        assert (embedded, backward) == ({("all_reduce", stream): 1}, {})


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_loss_of_the_trainer_gathers_no_logits(loss_of_trainer, sequence_parallel):
    options = TPOptions(Degrees(tp=4), True, sequence_parallel)
    communication = count(CASES[0].build, options, loss=loss_of_trainer)
    assert communication.minimal, communication.lines()
    ends = [c for c in communication.collectives if c.module in (None, "lm_head")]
    assert max(c.elements for c in ends) < BATCH * SEQUENCE * 512 // 4
    assert [c.elements for c in ends if c.module is None] == [BATCH * SEQUENCE] * 3


def test_the_backward_mirrors_the_forward_module_by_module():
    communication = count(Tiny, TPOptions(Degrees(tp=2)), TinyPlan)
    forward, backward = (
        [(c.operation, c.module) for c in communication.collectives if c.phase == phase and c.module]
        for phase in ("forward", "backward")
    )
    block = [
        ("all_gather", "attn"),
        ("reduce_scatter", "attn.o_proj"),
        ("all_gather", "mlp"),
        ("reduce_scatter", "mlp.down_proj"),
    ]
    blocks = [(operation, f"layers.{i}.{name}") for i in range(2) for operation, name in block]
    assert forward == [("all_reduce", "embed"), *blocks, ("all_gather", "lm_head")]
    mirrored = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
    assert backward == [
        *[(mirrored[operation], name) for operation, name in reversed(forward[1:])],
        # The embedding's output is replicated, so the gradient of the sharded stream is gathered at the first block.
        ("all_gather", "layers.0"),
    ]


def test_bytes_of_a_ring():
    """Sequence parallelism splits each all-reduce into two collectives with the same sum of bytes.

    See Korthikanti et al. 2022, 4.2.2.
    """
    received = [
        sum(
            c.received
            for c in count(Tiny, TPOptions(Degrees(tp=4), sequence_parallel=sp), TinyPlan).of(
                "layers.1", "backward"
            )
        )
        for sp in (True, False)
    ]
    assert received == [4 * BATCH * SEQUENCE * 16 * 4 * 3 // 4] * 2  # float32, the shards of 3 of 4 ranks


@pytest.mark.parametrize(("sequence_parallel", "length"), [(True, 20), (False, 18)])
def test_the_bound_counts_all_tokens(sequence_parallel, length):
    options = TPOptions(Degrees(tp=4), sequence_parallel=sequence_parallel)
    communication = count(Tiny, options, TinyPlan, sequence=length)
    assert communication.minimal, communication.lines()
    assert {a.elements for a in communication.needed("layers.0", "forward")} == {BATCH * length * 16}


class NoMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(16), Tiny().layers[0].attn

    def forward(self, x):
        return x + self.attn(hidden_states=self.attn_norm(x))


def test_the_bound_counts_the_regions_of_each_block():
    def build():
        model = Tiny()
        model.layers[1] = NoMLP()
        return model

    communication = count(build, TPOptions(Degrees(tp=2)), TinyPlan)
    assert communication.minimal
    expected = {("all_gather", BATCH * SEQUENCE * 16): 1, ("reduce_scatter", BATCH * SEQUENCE * 16): 1}
    assert (
        issued(communication, "layers.1", "forward")
        == issued(communication, "layers.1", "backward")
        == expected
    )
    assert len(communication.needed("layers.0", "forward")) == 4


def entered_alone(style):
    """Return a copy of `style` with which a module gathers its own input."""

    def install(original, module, border):
        ranks = HeadRanks(border.rank, border.group[1], border.group, border, (0, 1))
        Region(reduce_output=False).by_weights(module, Site(border, ranks))
        original(module, border)

    return installed(style, install)


def without_gather(plan):
    return {"": installed(plan[""], lambda right, module, border: None)}


def each_alone(region, *names):
    def styles(plan):
        return without_gather(getattr(plan, region)()) | {n: entered_alone(plan.colwise()) for n in names}

    return styles


# Plans of Hugging Face and flame without PrepareModuleInput do the same.
GATHER_FOR_EACH_PROJECTION = changed(TinyPlan, each_alone("attn_input", "q_proj", "k_proj", "v_proj"))
GATHER_FOR_GATE_AND_UP = changed(TinyPlan, mlp=each_alone("mlp_input", "gate_proj", "up_proj"))


class TorchStyles(TinyPlan):
    """The same waste with torch's styles, where DTensor issues the collectives."""

    def attn_plan(self, attn):
        stream = self.options.stream.placement
        colwise = {n: ColwiseParallel(input_layouts=stream) for n in ("q_proj", "k_proj", "v_proj")}
        return {
            **colwise,
            "q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "o_proj": RowwiseParallel(output_layouts=stream),
        }


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("plan", "projections"),
    [
        (GATHER_FOR_EACH_PROJECTION, ["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
        (TorchStyles, ["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
        (GATHER_FOR_GATE_AND_UP, ["mlp.gate_proj", "mlp.up_proj"]),
    ],
)
def test_a_gather_for_each_projection_is_more_than_needed(plan, projections, sequence_parallel):
    communication = count(Tiny, TPOptions(Degrees(tp=2), True, sequence_parallel), plan)
    assert not communication.minimal
    expected = "reduce_scatter" if sequence_parallel else "all_reduce"
    for block in communication.decoder.names:
        names = [f"{block}.{name}" for name in projections]
        # The gather of the first projection is needed, the others are not.
        forward = [c.module for c in communication.exceeding(block, "forward")]
        assert forward == (names[1:] if sequence_parallel else [])
        # One sum of gradients is needed; autograd decides which one runs first.
        backward = communication.exceeding(block, "backward")
        assert len(backward) == len(names) - 1
        assert {c.module for c in backward} < set(names)
        assert {c.operation for c in backward} == {expected}
    text = "\n".join(communication.lines())
    assert f"more than is needed: backward {expected.replace('_', '-')} of 512 elements at layers.0." in text


def test_gathered_logits_are_more_than_needed_if_the_loss_could_use_shards():
    communication = count(
        CASES[0].build, TPOptions(Degrees(tp=2), loss_parallel=False), judged=TPOptions(Degrees(tp=2))
    )
    (logits,) = communication.exceeding("head", "forward")
    assert (logits.operation, logits.module, logits.elements) == (
        "all_gather",
        "lm_head",
        BATCH * SEQUENCE * 512,
    )


def test_a_loss_that_gathers_the_logits_is_named_outside_of_the_model():
    def gathering(logits, labels):
        return torch_loss(logits.redistribute(placements=[Replicate()]).to_local(), labels)

    communication = count(CASES[0].build, TPOptions(Degrees(tp=2)), loss=gathering)
    (logits,) = communication.exceeding("loss", "forward")
    assert (logits.operation, logits.module) == ("all_gather", None)


def test_a_gradient_summed_in_each_backward_is_more_than_needed():
    """A hook on each parameter sums its gradient in each micro batch, instead of once per step."""

    def install(original, module, border):
        weight = module._parameters["weight"]
        weight.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))

    hooked = changed(TinyPlan, lambda plan: {"q_norm": installed(plan.replicated_in_region(), install)})
    communication = count(Tiny, TPOptions(Degrees(tp=2)), hooked)
    for block in communication.decoder.names:
        (gradient,) = communication.exceeding(block, "backward")
        assert (gradient.operation, gradient.module) == ("all_reduce", f"{block}.attn.q_norm")
        assert gradient.elements == 4


def test_gradients_of_replicated_parameters_are_counted_separately():
    communication = count(Tiny, TPOptions(Degrees(tp=2)), TinyPlan)
    norms = [
        f"layers.{i}.{norm}.weight" for i in range(2) for norm in ("attn_norm", "mlp_norm", "attn.q_norm")
    ]
    biases = [f"layers.{i}.{linear}.bias" for i in range(2) for linear in ("attn.o_proj", "mlp.down_proj")]
    assert set(communication.gradients) == {*norms, *biases, "norm.weight"}
    assert communication.gradients["layers.0.attn.q_norm.weight"] == 4 * 4
    # If the stream is replicated, all parameters outside of regions have full gradients, so no sum is needed.
    replicated = count(Tiny, TPOptions(Degrees(tp=2), sequence_parallel=False), TinyPlan)
    assert set(replicated.gradients) == {f"layers.{i}.attn.q_norm.weight" for i in range(2)}


def test_in_place_collectives_are_counted():
    with fake_ranks(4), record_collectives(nn.Identity()) as record:
        tensor, gathered = torch.ones(6), [torch.empty(6) for _ in range(4)]
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather(gathered, tensor)
        dist.reduce_scatter(tensor, gathered)
        dist.barrier()
    # The bytes of the full tensor, and the received bytes, for 6 float32 elements per rank.
    assert [(c.operation, c.bytes, c.received) for c in record.collectives] == [
        ("all_reduce", 24, 36),
        ("broadcast", 24, 24),
        ("all_gather", 96, 72),
        ("reduce_scatter", 96, 72),
    ]


def test_checkpointed_activations_are_refused():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    with fake_ranks(2) as mesh:
        model = Tiny()
        applied = apply_plan(model, mesh, plan=TinyPlan)
        model.layers[0] = checkpoint_wrapper(model.layers[0])
        run = partial(step, model, token_ids(model))
        with pytest.raises(PlanError, match=r"layers\.0\.attn is called again"):
            count_communication(model, applied, run, TPOptions(Degrees(tp=2)))


def test_published_sizes_are_counted_without_memory():
    options, length = TPOptions(Degrees(tp=8)), 4096
    with fake_ranks(8) as mesh:
        model = modeling.build(modeling.load_config("transformer", "7B", num_hidden_layers=2)).to(
            torch.bfloat16
        )
        applied = apply_plan(model, mesh)
        # The parameters are on meta before they become fake tensors.
        with FakeTensorMode(allow_non_fake_inputs=True):
            run = partial(step, model.to_empty(device="cpu"), torch.zeros(1, length, dtype=torch.long))
            communication = count_communication(model, applied, run, options)
    assert communication.minimal
    table = communication.lines()
    # 4 x 7/8 x 1 x 4096 x 4096 x 2 bytes
    assert table[1].startswith("2 x TransformerBlock (Attention, GatedMLP)")
    assert table[1].endswith("117.4 MB")
    assert table[-1] == "once a step the gradients of 5 replicated parameters are summed: 41.0 kB"


def test_the_table_and_its_json():
    communication = count(Tiny, TPOptions(Degrees(tp=2)), GATHER_FOR_EACH_PROJECTION)
    count_as_json = json.loads(json.dumps(communication.to_dict()))
    assert not count_as_json["minimal"]
    block = count_as_json["parts"][0]
    assert (block["name"], block["parts"]) == ("2 x Block (Attention, MLP)", ["layers.0", "layers.1"])
    assert [c["module"] for c in block["forward"]["exceeding"]] == [
        "layers.0.attn.k_proj",
        "layers.0.attn.v_proj",
    ]
    line = communication.lines()[1].split("  ")
    cells = [cell.strip() for cell in line if cell.strip()]
    assert cells == [
        "2 x Block (Attention, MLP)",
        "forward",
        "4 all-gather, 2 reduce-scatter",
        "2 all-gather, 2 reduce-scatter",
        "6.1 kB",  # 6 x 1/2 x 2 x 16 x 16 x 4 bytes
    ]
