"""Experts over ranks: every quantity is the whole model's, however tokens are routed; bugs that were shipped are found.

    what was shipped, and by whom                                                 mutant, or test
    the router's gradient wrong (transformers #48687), or only that of the        the router's gradient
        balance loss (NeMo Automodel #2995)
    the gradient of what experts read stays on its rank, a missing                the rows' gradient, the rows' sum
        reduce-scatter: 14 % off in the loss after 100 steps (Automodel #1260)
    each rank of tensor parallelism sends all tokens (DeepSpeed #2074)            tokens of each rank
    gradients of experts not summed over their copies (Megatron-LM #5916)         a sum over copies
    a gradient norm of one's own experts (Automodel #3817; Megatron-LM #5916)     others' norms
    a rank to which no row came leaves the backward's exchanges to the others,    test_a_rank_that_leaves_out_…
        which wait (Automodel #935, Megatron-LM #4851), or has no gradient
        (Automodel #2995)
    fewer tokens than ranks of tensor parallelism (torchtitan #3622)              one token, of the first test

Each is proved over threads, in float64, by one plain step unless said otherwise.
"""

import copy
import itertools
import math
import re

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests import zoo
from tests.support.mutants import bugs, faults
from tests.support.plain_proofs import verify_plain
from tests.support.process_groups import run_on_threads
from titanplans import Degrees, PlanError, apply_plan, check_plan, proof, registered_plans
from titanplans.apply import ways
from titanplans.loss import cross_entropy
from titanplans.split import gradients
from titanplans.split.experts import dispatch
from titanplans.split.experts.loads import Loads
from titanplans.split.gradients import align_gradients
from titanplans.split.layout import Layout, StreamLayout
from titanplans.split.module_weight import ParameterMesh
from titanplans.styles.base import SplitOver
from titanplans.styles.by_expert import ByExpert

HELD = 2
"""Experts on each rank; a token goes to as many."""
ROUTINGS = {
    "the first rank's": lambda sender, ranks: (0, 1),
    "the second rank's": lambda sender, ranks: (2, 3),
    "another rank's": lambda sender, ranks: tuple(HELD * ((sender + 1) % ranks) + at for at in range(HELD)),
    "one of the first's, one of the second's": lambda sender, ranks: (0, 3),
}
"""The experts of each token, by the rank that sends it among those that share experts, and the number of these."""
CUTS = [(2, 1, 2), (1, 2, 2), (2, 2, 4), (2, 2, 2), (1, 4, 2)]
"""Degrees of tensor, context and expert parallelism. The last two have two copies of each expert."""
SHARDED = dict(loss_parallel=True, sequence_parallel=True)
MODELS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "glm4_moe")
MODELS += ("deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text")


class Routed:
    """A Mixtral whose tokens go to the experts that a routing says."""

    def __init__(self, routing, size, length, tp, cp, ep):
        self.model = zoo.build("mixtral", num_local_experts=HELD * ep)
        own = length // cp  # tokens of each sequence that a rank has

        def owner(sequence, token):
            return token // own * tp + (sequence * own + token % own) * tp // (size * own)

        def chosen(sequence, token):
            return ROUTINGS[routing](owner(sequence, token) % ep, ep)

        self.came = torch.zeros(tp * cp, ep, HELD, dtype=torch.long)
        """Rows in a layer, by the rank to which they come, by sender, and by that rank's expert."""
        for sequence in range(size):
            for token in range(length):
                sender = owner(sequence, token)
                for expert in chosen(sequence, token):
                    self.came[sender // ep * ep + expert // HELD, sender % ep, expert % HELD] += 1
        wanted = torch.tensor(
            [chosen(sequence, token) for sequence in range(size) for token in range(length)]
        )
        for name, module in self.model.named_modules():
            if name.endswith(".gate"):
                module.register_forward_hook(choosing(wanted))


def choosing(wanted):
    """A router's hook that chooses the experts `wanted` of each token, with weights by the router's own logits."""
    whole = []

    def choose(router, args, output):
        logits, rows = output[0], args[0].detach()
        if not whole:  # the whole model runs first: by its values a token is found again on a rank
            whole.append(rows)
        chosen = wanted[torch.cdist(rows, whole[0]).argmin(1)]
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return choose


@pytest.fixture
def came(monkeypatch):
    """The numbers of rows that ranks compute, by sender and expert: of each layer and rank, in turns."""
    calls, computed = [], dispatch._run_local_experts

    def noting(module, run, rows, came):
        assert len(rows) == came.sum()
        calls.append(came.clone())
        return computed(module, run, rows, came)

    monkeypatch.setattr(dispatch, "_run_local_experts", noting)
    return calls


def cuts_of(tp, cp, ep):
    return dict(degrees=[Degrees(tp=tp, cp=cp, ep=ep)])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("size", "length"), [(2, 16), (1, 1)], ids=["32 tokens", "one token a CP rank"])
@pytest.mark.parametrize(("tp", "cp", "ep"), CUTS)
def test_a_step_is_right_however_tokens_are_routed(routing, size, length, tp, cp, ep, came):
    few = length == 1  # fewer than ranks of tensor parallelism, which share a sequence equally or not at all
    length *= cp if few else 1
    routed = Routed(routing, size, length, tp, cp, ep)
    options = {"sequence_parallel": False} if few else {}
    report = verify_plain(
        lambda: routed.model, **cuts_of(tp, cp, ep), batch_size=size, seq_len=length, **options
    )
    assert report.passed, report.table()
    layers = torch.stack(came).split(tp * cp)
    assert len(layers) == len(routed.model.model.layers) * len(report.cases)
    for layer in layers:
        assert layer.tolist() == routed.came.tolist()


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2)])
def test_a_rank_without_rows_is_right_in_every_condition(tp, cp, came):
    """Among them frozen experts, recomputed blocks, several batches before one backward, evaluation and a cache."""
    routed = Routed("the second rank's", 2, 16, tp, cp, 2)
    report = proof.verify(lambda: routed.model, **cuts_of(tp, cp, 2), conditions="each")
    assert report.passed, report.table()
    assert came
    for first, second in torch.stack(came).split(2):
        assert not first.any()
        assert second.any()


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_with_experts_is_right(name, cpu_kernels):
    report = verify_plain(lambda: zoo.build(name), degrees=[Degrees(tp=2, ep=2), Degrees(cp=2, ep=2)])
    assert report.passed, report.table()


def exchanged(change):
    """A mutant: what comes to the exchange, rows, numbers of their experts and weights, is changed."""

    def put(patch):
        right = dispatch._through_experts
        patch.setattr(
            dispatch, "_through_experts", lambda module, run, *rows: right(module, run, *change(*rows))
        )

    return put


def in_order_of_experts(x, experts, weights):
    order = experts[:, 0].argsort(stable=True)
    return x[order], experts[order], weights


def without_shares(patch):
    patch.setattr(ways, "ExpertRanks", lambda group, *_: dispatch.ExpertRanks(group, 1, 0))


class OfExperts(Layout):
    """A layout that tells experts' parameters from others."""


def copies_unsummed(patch):
    def gradient(placing, layout):
        found = right(placing, layout)
        copies = placing.replica_dims if isinstance(layout, OfExperts) else 0
        return (Replicate(),) * copies + found[copies:]

    right = ParameterMesh.gradient
    patch.setattr(ParameterMesh, "gradient", gradient)
    patch.setattr(ByExpert, "layout", lambda style, name, param, over: OfExperts(Shard(0), Shard(0)))


def norm_of_own_experts(patch):
    def groups(tensor):
        names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else ()
        return () if "ep" in names else right(tensor)

    right = gradients._sharding_groups
    patch.setattr(gradients, "_sharding_groups", groups)


def entry_unsummed(patch):
    plan = registered_plans()["mixtral"]
    return bugs.changed(plan, mlp=lambda plan, style: faults.entry_unsummed(style))


GRADIENTS = {"gradients", "norm", "AdamW"}
"""The loss and the logits are right: nobody would see it in the first step's."""
ALL = {"loss", "logits", *GRADIENTS}
MUTANTS = {
    "the router's gradient": (exchanged(lambda x, at, by: (x, at, by.detach())), CUTS[:3], GRADIENTS),
    "the rows' gradient": (exchanged(lambda x, at, by: (x.detach(), at, by)), CUTS[:3], GRADIENTS),
    "the rows' sum": (entry_unsummed, CUTS[:1], GRADIENTS),
    "tokens of each rank": (without_shares, [(2, 1, 2), (2, 2, 4)], ALL),
    "the neighbouring expert": (exchanged(lambda x, at, by: (x, at ^ 1, by)), CUTS[:3], ALL),
    "results in the order of experts": (exchanged(in_order_of_experts), CUTS[:3], ALL),
    "a sum over copies": (copies_unsummed, CUTS[3:], {"replicas", *GRADIENTS}),
    "others' norms": (norm_of_own_experts, [(1, 2, 2), (2, 2, 4), (1, 4, 2)], {"norm", "replicas"}),
}
"""By what they lack or do: the mutant, where it is one, and the quantities that are wrong."""


@pytest.mark.parametrize(
    ("name", "degrees"), [(name, degrees) for name, (_, where, _) in MUTANTS.items() for degrees in where]
)
def test_a_mutant_is_found(name, degrees, monkeypatch):
    put, _, wrong = MUTANTS[name]
    plan = put(monkeypatch)
    (case,) = verify_plain(lambda: zoo.build("mixtral"), plan, **cuts_of(*degrees), **SHARDED).cases
    assert {check.what for check in case.checks if not check.passed} == wrong


@pytest.mark.parametrize("routing", ["the first rank's", "the second rank's"])
@pytest.mark.parametrize(("tp", "cp", "ep"), CUTS[:2])
@pytest.mark.parametrize(
    ("instead", "words"),
    [(lambda rows: rows, "after its backward: .* gather"), (torch.zeros_like, "the backward.* AllToAllBase")],
    ids=["gradients of zeros", "the backward's exchanges"],
)
def test_a_rank_that_leaves_out_what_no_row_needs_is_found(instead, words, tp, cp, ep, routing, monkeypatch):
    computed = dispatch._run_local_experts
    monkeypatch.setattr(
        dispatch,
        "_run_local_experts",
        lambda *given: computed(*given) if len(given[2]) else instead(given[2]),
    )
    routed = Routed(routing, 2, 16, tp, cp, ep)
    (case,) = verify_plain(lambda: routed.model, **cuts_of(tp, cp, ep), **SHARDED).cases
    assert not case.passed
    assert re.search(rf"does not run, .*{words}", case.notes[0]), case.notes


CAPACITY = 0.5
"""Of what a rank sends; with two experts a token most of them overflow."""


def within_capacity(experts, weights, ranks):
    """The weights [N, k] of pairs, zero where a rank that sends so many rows would drop them; and how many it drops."""
    kept = torch.zeros_like(weights)
    for rows in torch.arange(len(experts)).tensor_split(ranks):
        room = [math.ceil(CAPACITY * experts[rows].numel() / 4)] * 4
        for row, place in itertools.product(rows.tolist(), range(experts.shape[1])):
            expert = int(experts[row, place])
            kept[row, place] = room[expert] > 0
            room[expert] -= 1
    return weights * kept, int((kept == 0).sum())


def test_a_capacity_drops_the_last_rows_of_each_rank_and_counts_them():
    whole, ids = zoo.build("mixtral").double().train(), torch.arange(48).view(3, 16) % 40
    whole.set_experts_implementation("eager")
    split, dropped = [copy.deepcopy(whole) for _ in range(2)], []

    def limit(module, given):
        rows, experts, weights = given
        weights, number = within_capacity(experts, weights, 2)
        dropped.append(number)
        return rows, experts, weights

    for layer in whole.model.layers:
        layer.mlp.experts.register_forward_pre_hook(limit)
    loss = cross_entropy(whole(input_ids=ids, use_cache=False).logits, ids, ids.numel())
    loss.backward()

    def work(rank):
        model = split[rank.mesh.get_local_rank()]
        meshes = rank.mesh_of(1), rank.mesh_of.of_experts(2)
        loads = Loads(model)
        apply_plan(model, meshes[0], experts=meshes[1], expert_capacity_factor=CAPACITY)
        found = cross_entropy(model(input_ids=ids, use_cache=False).logits, ids, ids.numel())
        found.backward()
        align_gradients(model.parameters())
        gradients = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        return found.detach(), gradients, loads.take_dropped([meshes[0].get_group()])

    found, gradients, counted = run_on_threads(work, 2)
    assert 0 < sum(dropped) < 2 * ids.numel() * len(dropped)
    assert counted == sum(dropped)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(gradients, {name: param.grad for name, param in whole.named_parameters()})


class Counted(torch.nn.Module):
    """A mixture in the form of torchtitan's: rows go to the experts in their order, with the numbers of rows."""

    class Experts(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.num_experts = 4
            self.weight = torch.nn.Parameter(torch.randn(4, width, width) / 8)

        def forward(self, x, counts):
            parts = x.split(counts.tolist())
            return torch.cat([part @ weight for part, weight in zip(parts, self.weight, strict=True)])

    def __init__(self, width):
        super().__init__()
        self.gate, self.experts = torch.nn.Linear(width, 4, bias=False), self.Experts(width)

    def forward(self, x):
        rows = x.flatten(0, -2)
        scores, chosen = self.gate(rows).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        made = self.experts(rows[order // 2], torch.bincount(chosen.flatten(), minlength=4))
        mixed = made[order.argsort()].unflatten(0, (-1, 2)) * scores[..., None]
        return mixed.sum(1).view_as(x)


class CountedPlan(registered_plans()["llama"]):
    def mlp_plan(self, mlp):
        parts = {"experts": self.by_expert(), "gate": self.replicated_in_region()}
        return {**self.mlp_region("x"), **parts}


@pytest.mark.parametrize(
    "degrees", [Degrees(tp=2, ep=2), Degrees(cp=2, ep=2), Degrees(tp=2, cp=2, ep=4)], ids=str
)
def test_experts_that_take_counted_rows_are_right(degrees):
    model = zoo.build("llama")
    for layer in model.model.layers:
        layer.mlp = Counted(model.config.hidden_size).double()
    report = proof.verify(lambda: model, CountedPlan, degrees=[degrees], conditions="each")
    assert report.passed, report.table()


@pytest.mark.parametrize(
    ("factor", "words"),
    [(1.0, "= 1.0: with expert_parallel_degree = 1 no tokens are sent"), (0, "= 0: it has to be above 0")],
)
def test_a_capacity_that_has_no_meaning_is_refused(factor, words):
    def work(rank):
        with pytest.raises(PlanError) as refused:
            apply_plan(zoo.build("mixtral"), rank.mesh_of(1), expert_capacity_factor=factor)
        return str(refused.value)

    assert f"expert_capacity_factor {words}" in run_on_threads(work, 2)


def test_what_takes_every_row_for_every_expert_has_no_biases():
    model = zoo.build("llama4_text")
    for layer in model.model.layers:
        if (experts := getattr(layer.feed_forward, "experts", None)) is not None:
            experts.down_proj_bias = torch.nn.Parameter(torch.zeros(experts.num_experts, experts.hidden_size))
    with pytest.raises(
        PlanError, match=r"every token for every expert and has down_proj_bias: .*degree at 1"
    ):
        check_plan(model, Degrees(ep=2))


class _Experts(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.up_proj = torch.nn.Parameter(torch.zeros(attributes.pop("shape", (4, 8, 8))))
        vars(self).update(attributes)

    def forward(self, x, experts, weights):
        return x


class _Rows(_Experts):
    def forward(self, x, a, b, c):
        return x


EP = SplitOver(2, StreamLayout())


def test_what_experts_lack_is_named():
    remedy = ": leave expert_parallel_degree at 1, which splits each expert's width"
    assert ByExpert().refusal(_Experts(num_experts=4), EP) is None
    assert ByExpert().refusal(_Experts(), EP) == (
        "it has no attribute num_experts, which its class has to set" + remedy
    )
    flat = ByExpert().refusal(_Experts(num_experts=4, shape=(4, 8)), EP)
    assert flat == "it has no parameter [num_experts, ...] of three dimensions" + remedy
    assert "its forward takes x, a, b, c, instead of hidden states, " in ByExpert().refusal(
        _Rows(num_experts=4), EP
    )


@pytest.mark.parametrize(
    ("name", "number", "tp", "ep", "words"),
    [
        ("mixtral", 4, 1, 3, "= 3 does not divide .*experts = 4 .*: 1, 2 or 4 would work"),
        ("mixtral", 4, 2, 8, "= 8 does not divide .*experts = 4 .*: 2 or 4 would work"),
        ("mixtral", 4, 4, 2, "= 2 is not a multiple of .* = 4, .*: set it to 4, or tensor_.* to 1 or 2"),
        ("mixtral", 3, 2, 2, "= 2 .* = 3 .*: set both it and tensor_parallel_degree to 1 or 3"),
        ("gla", 0, 1, 2, "= 2: GLAPlan splits no experts of GLAForCausalLM; set it to 1"),
        ("llama", 0, 2, 2, "= 2: LlamaPlan splits no experts of LlamaForCausalLM; set it to 1"),
    ],
)
def test_a_degree_that_does_not_fit_is_refused_in_a_line(name, number, tp, ep, words):
    model = zoo.build(name, **({"num_local_experts": number} if number else {}))
    with pytest.raises(PlanError, match=words) as refused:
        check_plan(model, Degrees(tp=tp, ep=ep))
    assert "expert_parallel_degree" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_mesh_that_does_not_fit_is_refused_in_a_line():
    def work(rank):
        def refusal(experts):
            with pytest.raises(PlanError) as refused:
                apply_plan(zoo.build("mixtral"), rank.mesh_of(2)["tp"], experts=experts)
            return str(refused.value)

        ranks = torch.tensor(rank.mesh_of.ranks).view(2, 2)
        swapped = DeviceMesh("cpu", ranks, mesh_dim_names=("ep", "efsdp"))
        apart = DeviceMesh("cpu", ranks.t(), mesh_dim_names=("efsdp", "ep"))
        return refusal(rank.mesh), refusal(swapped), refusal(apart)

    unnamed, swapped, apart = run_on_threads(work, 4)
    needed = "experts needs a mesh of 'ep', or of replicas and 'ep', got"
    assert unnamed == f"{needed} 1 dimensions ('tp',): slice it, as mesh['efsdp', 'ep']"
    assert swapped == f"{needed} 2 dimensions ('ep', 'efsdp'): slice it, as mesh['efsdp', 'ep']"
    assert apart.startswith(
        "experts are distributed over ranks [4, 6], which do not include all ranks that a layer is split over, [4, 5]"
    )
    assert "\n" not in apart
