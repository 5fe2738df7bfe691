"""Expert parallelism: every quantity equals the unsplit model's for any routing, and shipped bugs are rejected.

    bug, and who shipped it                                                       mutant, or test
    the router's gradient wrong (transformers #48687), or only that of the        the router's gradient
        balance loss (NeMo Automodel #2995)
    the gradient of the experts' input is not sent back, a missing              the tokens' gradient, the tokens' sum
        reduce-scatter: 14 % off in the loss after 100 steps (Automodel #1260)
    each rank of tensor parallelism sends all tokens (DeepSpeed #2074)            tokens of each rank
    gradients of experts not summed over their replicas (Megatron-LM #5916)       a sum over replicas
    a gradient norm of the local experts alone (Automodel #3817; Megatron-LM #5916) others' norms
    a rank without tokens skips the collectives of the backward, and the others   test_a_rank_without_tokens_that_skips_…
        wait (Automodel #935, Megatron-LM #4851), or it has no gradient
        (Automodel #2995)
    fewer tokens than ranks of tensor parallelism (torchtitan #3622)              one token, of the first test

Proofs use threads, float64 and one plain step, unless a test says otherwise.
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

LOCAL = 2
"""Experts on each rank, and experts of each token."""
ROUTINGS = {
    "the first rank's": lambda sender, ranks: (0, 1),
    "the second rank's": lambda sender, ranks: (2, 3),
    "another rank's": lambda sender, ranks: tuple(LOCAL * ((sender + 1) % ranks) + at for at in range(LOCAL)),
    "one of the first's, one of the second's": lambda sender, ranks: (0, 3),
}
"""The experts of a token, from the index of its sender among the expert-parallel ranks, and the number of these ranks."""
DEGREES = [(2, 1, 2), (1, 2, 2), (2, 2, 4), (2, 2, 2), (1, 4, 2)]
"""Degrees of tensor, context and expert parallelism. The last two have two replicas of each expert."""
SHARDED = dict(loss_parallel=True, sequence_parallel=True)
MODELS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "glm4_moe")
MODELS += ("deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text")


class Routed:
    """A Mixtral that sends its tokens to the experts of `ROUTINGS[routing]`."""

    def __init__(self, routing, size, length, tp, cp, ep):
        self.model = zoo.build("mixtral", num_local_experts=LOCAL * ep)
        local = length // cp  # tokens of each sequence on a CP rank

        def owner(sequence, token):
            return token // local * tp + (sequence * local + token % local) * tp // (size * local)

        def chosen(sequence, token):
            return ROUTINGS[routing](owner(sequence, token) % ep, ep)

        self.token_counts = torch.zeros(tp * cp, ep, LOCAL, dtype=torch.long)
        """Count of tokens in a layer by receiving rank, by sender, and by expert of the receiving rank."""
        for sequence in range(size):
            for token in range(length):
                sender = owner(sequence, token)
                for expert in chosen(sequence, token):
                    self.token_counts[sender // ep * ep + expert // LOCAL, sender % ep, expert % LOCAL] += 1
        expected = torch.tensor(
            [chosen(sequence, token) for sequence in range(size) for token in range(length)]
        )
        for name, module in self.model.named_modules():
            if name.endswith(".gate"):
                module.register_forward_hook(choosing(expected))


def choosing(expected):
    """Return a router's hook that chooses the experts `expected[token]`, with weights from the router's own logits."""
    unsplit = []

    def choose(router, args, output):
        logits, tokens = output[0], args[0].detach()
        if not unsplit:  # The unsplit model runs first; a rank finds the index of a token by its values.
            unsplit.append(tokens)
        chosen = expected[torch.cdist(tokens, unsplit[0]).argmin(1)]
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return choose


@pytest.fixture
def token_counts(monkeypatch):
    """Return a list that fills with the counts of tokens by sender and expert, of each layer and rank in order."""
    calls, computed = [], dispatch._run_local_experts

    def recording(module, run, tokens, counts):
        assert len(tokens) == counts.sum()
        calls.append(counts.clone())
        return computed(module, run, tokens, counts)

    monkeypatch.setattr(dispatch, "_run_local_experts", recording)
    return calls


def degrees_of(tp, cp, ep):
    return dict(degrees=[Degrees(tp=tp, cp=cp, ep=ep)])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("size", "length"), [(2, 16), (1, 1)], ids=["32 tokens", "one token a CP rank"])
@pytest.mark.parametrize(("tp", "cp", "ep"), DEGREES)
def test_a_step_is_right_however_tokens_are_routed(routing, size, length, tp, cp, ep, token_counts):
    few = length == 1  # fewer tokens than TP ranks, so no sequence parallelism
    length *= cp if few else 1
    routed = Routed(routing, size, length, tp, cp, ep)
    options = {"sequence_parallel": False} if few else {}
    report = verify_plain(
        lambda: routed.model, **degrees_of(tp, cp, ep), batch_size=size, seq_len=length, **options
    )
    assert report.passed, report.table()
    layers = torch.stack(token_counts).split(tp * cp)
    assert len(layers) == len(routed.model.model.layers) * len(report.cases)
    for layer in layers:
        assert layer.tolist() == routed.token_counts.tolist()


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2)])
def test_a_rank_without_tokens_is_right_in_every_condition(tp, cp, token_counts):
    """The conditions include frozen experts, recomputation, several batches before one backward, evaluation and a cache."""
    routed = Routed("the second rank's", 2, 16, tp, cp, 2)
    report = proof.verify(lambda: routed.model, **degrees_of(tp, cp, 2), conditions="each")
    assert report.passed, report.table()
    assert token_counts
    for first, second in torch.stack(token_counts).split(2):
        assert not first.any()
        assert second.any()


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_with_experts_is_right(name, cpu_kernels):
    report = verify_plain(lambda: zoo.build(name), degrees=[Degrees(tp=2, ep=2), Degrees(cp=2, ep=2)])
    assert report.passed, report.table()


def exchanged(change):
    """Return a mutant that applies `change` to the arguments of the exchange: tokens, ids of their experts, weights."""

    def put(patch):
        original = dispatch._through_experts
        patch.setattr(
            dispatch,
            "_through_experts",
            lambda module, run, *tensors: original(module, run, *change(*tensors)),
        )

    return put


def in_order_of_experts(x, experts, weights):
    order = experts[:, 0].argsort(stable=True)
    return x[order], experts[order], weights


def all_tokens_from_each_rank(patch):
    patch.setattr(ways, "ExpertRanks", lambda group, *_: dispatch.ExpertRanks(group, 1, 0))


class OfExperts(Layout):
    """A layout that marks the parameters of experts."""


def replicas_unsummed(patch):
    def gradient(placing, layout):
        placements = original(placing, layout)
        replicas = placing.replica_dims if isinstance(layout, OfExperts) else 0
        return (Replicate(),) * replicas + placements[replicas:]

    original = ParameterMesh.gradient
    patch.setattr(ParameterMesh, "gradient", gradient)
    patch.setattr(ByExpert, "layout", lambda style, name, param, over: OfExperts(Shard(0), Shard(0)))


def norm_of_local_experts(patch):
    def groups(tensor):
        names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else ()
        return () if "ep" in names else original(tensor)

    original = gradients._sharding_groups
    patch.setattr(gradients, "_sharding_groups", groups)


def entry_unsummed(patch):
    plan = registered_plans()["mixtral"]
    return bugs.changed(plan, mlp=lambda plan, style: faults.entry_unsummed(style))


GRADIENTS = {"gradients", "norm", "AdamW"}
"""Quantities that are wrong although loss and logits of the first step are right."""
ALL = {"loss", "logits", *GRADIENTS}
MUTANTS = {
    "the router's gradient": (exchanged(lambda x, at, by: (x, at, by.detach())), DEGREES[:3], GRADIENTS),
    "the tokens' gradient": (exchanged(lambda x, at, by: (x.detach(), at, by)), DEGREES[:3], GRADIENTS),
    "the tokens' sum": (entry_unsummed, DEGREES[:1], GRADIENTS),
    "tokens of each rank": (all_tokens_from_each_rank, [(2, 1, 2), (2, 2, 4)], ALL),
    "the neighbouring expert": (exchanged(lambda x, at, by: (x, at ^ 1, by)), DEGREES[:3], ALL),
    "results in the order of experts": (exchanged(in_order_of_experts), DEGREES[:3], ALL),
    "a sum over replicas": (replicas_unsummed, DEGREES[3:], {"replicas", *GRADIENTS}),
    "others' norms": (norm_of_local_experts, [(1, 2, 2), (2, 2, 4), (1, 4, 2)], {"norm", "replicas"}),
}
"""By mutant, which leaves out or changes one step: the patch, the degrees at which it is a fault, and the wrong
quantities."""


@pytest.mark.parametrize(
    ("name", "degrees"), [(name, degrees) for name, (_, at, _) in MUTANTS.items() for degrees in at]
)
def test_a_mutant_is_rejected_by_the_wrong_quantities(name, degrees, monkeypatch):
    patch, _, wrong_quantities = MUTANTS[name]
    plan = patch(monkeypatch)
    (case,) = verify_plain(lambda: zoo.build("mixtral"), plan, **degrees_of(*degrees), **SHARDED).cases
    assert {check.what for check in case.checks if not check.passed} == wrong_quantities


@pytest.mark.parametrize("routing", ["the first rank's", "the second rank's"])
@pytest.mark.parametrize(("tp", "cp", "ep"), DEGREES[:2])
@pytest.mark.parametrize(
    ("instead", "message"),
    [
        (lambda tokens: tokens, "after its backward: .* gather"),
        (torch.zeros_like, "the backward.* AllToAllBase"),
    ],
    ids=["gradients of zeros", "the backward's exchanges"],
)
def test_a_rank_without_tokens_that_skips_its_experts_is_rejected(
    instead, message, tp, cp, ep, routing, monkeypatch
):
    computed = dispatch._run_local_experts
    monkeypatch.setattr(
        dispatch,
        "_run_local_experts",
        lambda *arguments: computed(*arguments) if len(arguments[2]) else instead(arguments[2]),
    )
    routed = Routed(routing, 2, 16, tp, cp, ep)
    (case,) = verify_plain(lambda: routed.model, **degrees_of(tp, cp, ep), **SHARDED).cases
    assert not case.passed
    assert re.search(rf"does not run, .*{message}", case.notes[0]), case.notes


CAPACITY = 0.5
"""The capacity factor. Each token goes to two experts, so most experts get more tokens than their capacity."""


def within_capacity(experts, weights, ranks):
    """Return the weights [tokens, k] with zeros for pairs that a sender drops, and the count of dropped pairs."""
    is_kept = torch.zeros_like(weights)
    for tokens in torch.arange(len(experts)).tensor_split(ranks):
        room = [math.ceil(CAPACITY * experts[tokens].numel() / 4)] * 4
        for token, choice in itertools.product(tokens.tolist(), range(experts.shape[1])):
            expert = int(experts[token, choice])
            is_kept[token, choice] = room[expert] > 0
            room[expert] -= 1
    return weights * is_kept, int((is_kept == 0).sum())


def test_a_capacity_drops_and_counts_the_last_tokens_of_each_rank():
    unsplit, ids = zoo.build("mixtral").double().train(), torch.arange(48).view(3, 16) % 40
    unsplit.set_experts_implementation("eager")
    split, dropped = [copy.deepcopy(unsplit) for _ in range(2)], []

    def limit(module, args):
        tokens, experts, weights = args
        weights, count = within_capacity(experts, weights, 2)
        dropped.append(count)
        return tokens, experts, weights

    for layer in unsplit.model.layers:
        layer.mlp.experts.register_forward_pre_hook(limit)
    loss = cross_entropy(unsplit(input_ids=ids, use_cache=False).logits, ids, ids.numel())
    loss.backward()

    def work(rank):
        model = split[rank.mesh.get_local_rank()]
        meshes = rank.mesh_of(1), rank.mesh_of.of_experts(2)
        loads = Loads(model)
        apply_plan(model, meshes[0], experts=meshes[1], expert_capacity_factor=CAPACITY)
        split_loss = cross_entropy(model(input_ids=ids, use_cache=False).logits, ids, ids.numel())
        split_loss.backward()
        align_gradients(model.parameters())
        gradients = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        return split_loss.detach(), gradients, loads.take_dropped([meshes[0].get_group()])

    split_loss, gradients, counted = run_on_threads(work, 2)
    assert 0 < sum(dropped) < 2 * ids.numel() * len(dropped)
    assert counted == sum(dropped)
    torch.testing.assert_close(split_loss, loss.detach())
    torch.testing.assert_close(gradients, {name: param.grad for name, param in unsplit.named_parameters()})


class Counted(torch.nn.Module):
    """A mixture of experts in torchtitan's form: the experts get their tokens sorted by expert, and the counts of tokens."""

    class Experts(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.num_experts = 4
            self.weight = torch.nn.Parameter(torch.randn(4, width, width) / 8)

        def forward(self, x, counts):
            by_expert = x.split(counts.tolist())
            return torch.cat([tokens @ weight for tokens, weight in zip(by_expert, self.weight, strict=True)])

    def __init__(self, width):
        super().__init__()
        self.gate, self.experts = torch.nn.Linear(width, 4, bias=False), self.Experts(width)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        scores, chosen = self.gate(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        outputs = self.experts(tokens[order // 2], torch.bincount(chosen.flatten(), minlength=4))
        mixed = outputs[order.argsort()].unflatten(0, (-1, 2)) * scores[..., None]
        return mixed.sum(1).view_as(x)


class CountedPlan(registered_plans()["llama"]):
    def mlp_plan(self, mlp):
        styles = {"experts": self.by_expert(), "gate": self.replicated_in_region()}
        return {**self.mlp_region("x"), **styles}


@pytest.mark.parametrize(
    "degrees", [Degrees(tp=2, ep=2), Degrees(cp=2, ep=2), Degrees(tp=2, cp=2, ep=4)], ids=str
)
def test_experts_that_take_sorted_tokens_and_counts_are_right(degrees):
    model = zoo.build("llama")
    for layer in model.model.layers:
        layer.mlp = Counted(model.config.hidden_size).double()
    report = proof.verify(lambda: model, CountedPlan, degrees=[degrees], conditions="each")
    assert report.passed, report.table()


@pytest.mark.parametrize(
    ("factor", "message"),
    [(1.0, "= 1.0: with expert_parallel_degree = 1 no tokens are sent"), (0, "= 0: it has to be above 0")],
)
def test_a_meaningless_capacity_is_refused(factor, message):
    def work(rank):
        with pytest.raises(PlanError) as refused:
            apply_plan(zoo.build("mixtral"), rank.mesh_of(1), expert_capacity_factor=factor)
        return str(refused.value)

    assert f"expert_capacity_factor {message}" in run_on_threads(work, 2)


def test_biases_are_refused_if_every_expert_takes_every_token():
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


class _OtherArguments(_Experts):
    def forward(self, x, a, b, c):
        return x


EP = SplitOver(2, StreamLayout())


def test_what_experts_lack_is_reported():
    remedy = ": leave expert_parallel_degree at 1, which splits each expert's width"
    assert ByExpert().refusal(_Experts(num_experts=4), EP) is None
    assert ByExpert().refusal(_Experts(), EP) == (
        "it has no attribute num_experts, which its class has to set" + remedy
    )
    flat = ByExpert().refusal(_Experts(num_experts=4, shape=(4, 8)), EP)
    assert flat == "it has no parameter [num_experts, ...] of three dimensions" + remedy
    assert "its forward takes x, a, b, c, instead of hidden states, " in ByExpert().refusal(
        _OtherArguments(num_experts=4), EP
    )


@pytest.mark.parametrize(
    ("name", "experts", "tp", "ep", "message"),
    [
        ("mixtral", 4, 1, 3, "= 3 does not divide .*experts = 4 .*: 1, 2 or 4 would work"),
        ("mixtral", 4, 2, 8, "= 8 does not divide .*experts = 4 .*: 2 or 4 would work"),
        ("mixtral", 4, 4, 2, "= 2 is not a multiple of .* = 4, .*: set it to 4, or tensor_.* to 1 or 2"),
        ("mixtral", 3, 2, 2, "= 2 .* = 3 .*: set both it and tensor_parallel_degree to 1 or 3"),
        ("gla", 0, 1, 2, "= 2: GLAPlan splits no experts of GLAForCausalLM; set it to 1"),
        ("llama", 0, 2, 2, "= 2: LlamaPlan splits no experts of LlamaForCausalLM; set it to 1"),
    ],
)
def test_a_degree_that_does_not_fit_is_refused_in_a_line(name, experts, tp, ep, message):
    model = zoo.build(name, **({"num_local_experts": experts} if experts else {}))
    with pytest.raises(PlanError, match=message) as refused:
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
        other_ranks = DeviceMesh("cpu", ranks.t(), mesh_dim_names=("efsdp", "ep"))
        return refusal(rank.mesh), refusal(swapped), refusal(other_ranks)

    unnamed, swapped, other_ranks = run_on_threads(work, 4)
    needed = "experts needs a mesh of 'ep', or of replicas and 'ep', got"
    assert unnamed == f"{needed} 1 dimensions ('tp',): slice it, as mesh['efsdp', 'ep']"
    assert swapped == f"{needed} 2 dimensions ('ep', 'efsdp'): slice it, as mesh['efsdp', 'ep']"
    assert other_ranks.startswith(
        "experts are distributed over ranks [4, 6], which do not include all ranks that a layer is split over, [4, 5]"
    )
    assert "\n" not in other_ranks
