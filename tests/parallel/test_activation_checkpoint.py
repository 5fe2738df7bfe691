"""Activation checkpointing: which operators a backward recomputes, and that gradients stay the same."""

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests import zoo
from tests.support import process_groups, step_comparison
from tests.support.operator_counts import OperatorCounts
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import apply_plan, modeling
from titanplans.parallel import ActivationCheckpoint, ParallelError
from titanplans.parallel.activation_checkpoint import apply_activation_checkpointing

TOKENS = torch.arange(16).reshape(2, 8) % 7
PRODUCTS = {"mm", "addmm"}
BLOCKS, IN_BLOCK, IN_MLP = 2, 7, 3  # Tiny: q, k, v, o, gate, up, down


def per_op(**options):
    """Return selective checkpointing by operator; `options` are named without the prefix per_op_sac_."""
    prefixed = {f"per_op_sac_{name}": value for name, value in options.items()}
    return ActivationCheckpoint(mode="selective", selective_ac_option="op", **prefixed)


def every(n):
    return ActivationCheckpoint(mode="selective", selective_ac_option=str(n))


FULL, MLP, KEEP_MIXER, BUDGET = (
    ActivationCheckpoint(mode=mode) for mode in ("full", "mlp", "keep_mixer", "memory_budget")
)


def drops(model, p=0.5):
    """Add dropout after every mixer and every MLP."""
    for layer in model.layers:
        for child in (layer.attn, layer.mlp):
            child.register_forward_hook(lambda module, args, output: F.dropout(output, p))


def build(policy=None, dropout=False):
    torch.manual_seed(0)
    model = Tiny()
    if dropout:
        drops(model)
    if policy is not None:
        apply_activation_checkpointing(model, policy)
    return model


def loss_of(model):
    return model(TOKENS).logits.square().mean()


def gradients(model):
    """Return the gradients by name, and the counts of operators in the backward."""
    torch.manual_seed(1)
    loss = loss_of(model)
    with OperatorCounts() as count:
        loss.backward()
    return {step_comparison.unwrapped_name(name): p.grad for name, p in model.named_parameters()}, count


EXPECTED = {
    FULL: BLOCKS * IN_BLOCK,
    ActivationCheckpoint(mode="full", early_stop=True): BLOCKS
    * (IN_BLOCK - 1),  # the backward does not need the result of down_proj
    MLP: BLOCKS * IN_MLP,
    KEEP_MIXER: BLOCKS * IN_MLP,
    every(2): IN_BLOCK,
    every(1): BLOCKS * IN_BLOCK,
    per_op(matmuls="all"): 0,
    per_op(): BLOCKS * 3,  # of seven products, the second, fourth and sixth
    per_op(matmuls="none"): BLOCKS * IN_BLOCK,
    per_op(matmuls="all", force_recompute_mm_shapes_by_fqns=("gate_proj",)): BLOCKS
    * 2,  # gate_proj was named by its size, and up_proj has the same size
    per_op(force_recompute_mm_shapes_by_fqns=("attn.",)): BLOCKS
    * 5,  # the four products of attention and one of the MLP; the policy counts only gate, up and down
}


@pytest.mark.parametrize("policy", EXPECTED, ids=str)
def test_recomputed_products(policy):
    (_, again), (_, alone) = gradients(build(policy)), gradients(build())
    assert again.of(*PRODUCTS) - alone.of(*PRODUCTS) == EXPECTED[policy]


@pytest.mark.parametrize("policy", EXPECTED, ids=str)
@pytest.mark.parametrize("dropout", [False, True])
def test_gradients_equal_those_without_checkpointing(policy, dropout):
    expected, _ = gradients(build(dropout=dropout))
    actual, _ = gradients(build(policy, dropout))
    for name, value in expected.items():
        # The same operators on the same values in the same order: equal bit for bit.
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("policy", [FULL, KEEP_MIXER, MLP, per_op()], ids=str)
def test_dropout_needs_the_random_state(policy):
    expected, _ = gradients(build(dropout=True))
    actual, _ = gradients(build(policy.replace(preserve_rng_state=False), dropout=True))
    assert not torch.allclose(actual["embed.weight"], expected["embed.weight"])


def attention_in_backward(policy):
    return gradients(build(policy))[1].of("_scaled_dot_product_flash_attention_for_cpu")


def test_attention_is_kept_or_recomputed():
    assert attention_in_backward(FULL) == BLOCKS
    assert attention_in_backward(per_op(keep_attention=False)) == BLOCKS
    for policy in (per_op(), KEEP_MIXER, MLP):
        assert attention_in_backward(policy) == 0


@pytest.mark.parametrize("policy", [per_op(), KEEP_MIXER, every(2)], ids=str)
def test_two_models_at_once_are_independent(policy):
    expected, alone = gradients(build(policy, dropout=True))
    models, losses, counts = [build(policy, dropout=True) for _ in range(2)], [], []
    for model in models:
        torch.manual_seed(1)
        losses.append(loss_of(model))
    for model, loss in zip(models, losses, strict=True):
        with OperatorCounts() as count:
            loss.backward()
        counts.append(count.counts)
        assert all(
            torch.equal(p.grad, expected[step_comparison.unwrapped_name(n)])
            for n, p in model.named_parameters()
        )
    assert counts == [alone.counts] * 2


@pytest.mark.parametrize("policy", [FULL, KEEP_MIXER], ids=str)  # torch allows it once by operator
def test_a_retained_graph_is_recomputed_twice(policy):
    model = build(policy, dropout=True)
    torch.manual_seed(1)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    once = model.embed.weight.grad.clone()
    loss.backward()
    assert torch.equal(model.embed.weight.grad, 2 * once)


@pytest.mark.parametrize("policy", [*EXPECTED, BUDGET], ids=str)
def test_names_in_state_dicts_are_unchanged(policy):
    bare, model = build(), build(policy)
    assert list(model.state_dict()) == list(bare.state_dict())
    model.load_state_dict(bare.state_dict())


def test_recomputation_of_autograd_functions_and_custom_operators():
    """An autograd.Function is always recomputed, unless it is in a kept mixer; a custom operator is not."""
    runs = Counter()

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            runs["function"] += 1
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    @torch.library.custom_op("titanplans_test::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        runs["operator"] += 1
        return x.square()

    square.register_autograd(
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )

    def runs_under(policy):
        model = Tiny()
        for layer in model.layers:
            layer.attn.register_forward_hook(lambda module, args, output: square(Square.apply(output)))
        runs.clear()
        apply_activation_checkpointing(model, policy)
        loss_of(model).backward()
        return runs["function"] // BLOCKS, runs["operator"] // BLOCKS

    assert runs_under(FULL) == (2, 2)
    assert runs_under(per_op()) == (2, 2)
    assert runs_under(per_op(keep_operators=("titanplans_test::square",))) == (2, 1)
    assert runs_under(per_op(keep_operators=("titanplans_test::square.default",))) == (2, 1)
    assert runs_under(KEEP_MIXER) == (1, 1)


@pytest.mark.parametrize("policy", [FULL, KEEP_MIXER, MLP, per_op()], ids=str)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_with_use_cache_in_its_config(policy, tp):
    """A model from from_pretrained has use_cache = True; its gradients equal those without a cache, also under a plan."""
    results = []
    for cached in (False, True):
        unsplit = zoo.build("llama", options=False).train()
        unsplit.config.use_cache = cached

        def work(rank, unsplit=unsplit):
            model = copy.deepcopy(unsplit)
            if tp > 1:
                apply_plan(model, rank.mesh, loss_parallel=False)
            apply_activation_checkpointing(model, policy)
            assert not model.config.use_cache
            model(torch.arange(16).view(2, 8)).logits.square().mean().backward()
            return [step_comparison.full_copy(p.grad) for p in model.parameters()]

        results.append(process_groups.run_on_threads(work, tp))
    torch.testing.assert_close(*results)


def test_an_output_of_a_kept_mixer_changed_in_place_is_refused():
    model = build(KEEP_MIXER)
    layer = model.layers[0]
    layer.mlp_norm.register_forward_pre_hook(lambda module, args: None)

    def in_place(module, args, output):
        module.seen = output

    layer.attn.register_forward_hook(in_place)
    loss = loss_of(model)
    with torch.no_grad():
        layer.attn.seen.mul_(2)
    with pytest.raises(ParallelError, match="output of Attention was changed in place"):
        loss.backward()


def applied(policy, model=None):
    apply_activation_checkpointing(Tiny() if model is None else model, policy)


REFUSED = {
    "lists of blocks is shorter than that": lambda: applied(every(3)),
    "has no vision tower": lambda: applied(ActivationCheckpoint(mode="full", scope="vision")),
    "none of its blocks has an MLP": lambda: applied(MLP, without("mlp")),
    "none of its blocks has a token mixer": lambda: applied(KEEP_MIXER, without("attn")),
    '"nobody::knows" is no operator': lambda: applied(per_op(keep_operators=("nobody::knows",))),
    '"relu" is no operator': lambda: applied(per_op(keep_operators=("relu",))),
    '"aten::relu.loud" is no operator': lambda: applied(per_op(keep_operators=("aten::relu.loud",))),
    "draws random numbers": lambda: applied(per_op(keep_operators=("aten::native_dropout",))),
    "per_op_sac_matmuls decides about these": lambda: applied(per_op(keep_operators=("aten::mm",))),
    "exceptions to per_op_sac_matmuls": lambda: per_op(matmuls="none", force_recompute_mm_shapes_by_fqns=("o_proj",)),
    "in no name of a Linear": lambda: applied(per_op(force_recompute_mm_shapes_by_fqns=("router",))),
    "no other operator is kept": lambda: per_op(matmuls="none", keep_attention=False, keep_collectives=False),
    "already has activation": lambda: [applied(policy, model) for model in [Tiny()] for policy in (MLP, FULL)],
    "already has activation checkpointing": lambda: [applied(BUDGET, model) for model in [Tiny()] for _ in range(2)],
    "recomputes its blocks itself": lambda: applied(FULL, checkpointing_itself()),
}  # fmt: skip


def without(name):
    model = Tiny()
    for layer in model.layers:
        delattr(layer, name)
    return model


def checkpointing_itself():
    model = gemma3()
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize("message", REFUSED)
def test_policies_that_can_not_be_applied_are_refused(message):
    with pytest.raises(ParallelError, match=message):
        REFUSED[message]()


def gemma3():
    return modeling.build(zoo.config("gemma3", num_hidden_layers=3, vision_config=dict(num_hidden_layers=3)))


@pytest.mark.parametrize(
    ("scope", "towers"),
    {
        "all": {"vision_tower", "language_model"},
        "language": {"language_model"},
        "vision": {"vision_tower"},
    }.items(),
)
def test_scopes(scope, towers):
    model = gemma3()
    apply_activation_checkpointing(model, every(2).replace(scope=scope))
    wrapped = [n.split(".") for n, m in model.named_modules() if type(m).__name__ == "CheckpointWrapper"]
    assert {name[1] for name in wrapped} == towers
    assert [name[-1] for name in wrapped] == ["1"] * len(towers), "each list of blocks is counted separately"


COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
UNDER_TP = {
    "none": None,
    "full": FULL,
    "full, early stop": ActivationCheckpoint(mode="full", early_stop=True),
    "kept": per_op(matmuls="none"),
    "not kept": per_op(keep_collectives=False),
    "mlp": MLP,
    "mixer": KEEP_MIXER,
}


def collectives_in_backward(rank):
    from torch.distributed.device_mesh import init_device_mesh

    from titanplans import apply_plan

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    results = {}
    for sequence_parallel in (True, False):
        for name, policy in UNDER_TP.items():
            torch.manual_seed(0)
            model = Tiny()
            apply_plan(model, mesh, plan=TinyPlan, sequence_parallel=sequence_parallel, loss_parallel=False)
            if policy is not None:
                apply_activation_checkpointing(model, policy)
            grads, count = gradients(SimpleTokens(model))
            grads = {n: g.full_tensor() for n, g in grads.items()}
            results[sequence_parallel, name] = grads, count.of(*COLLECTIVES)
    return results


class SimpleTokens(torch.nn.Module):
    """The model under its own parameter names, called with tokens alone."""

    def __init__(self, model):
        super().__init__()
        self._modules = model._modules
        self.__dict__["model"] = model

    def forward(self, tokens):
        return SimpleNamespace(logits=self.model(tokens).logits)


under_tp = process_groups.module_fixture(collectives_in_backward, 2)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_kept_collectives_are_not_recomputed(under_tp, sequence_parallel):
    (expected, least), counts = under_tp[sequence_parallel, "none"], {}
    for name in UNDER_TP:
        grads, counts[name] = under_tp[sequence_parallel, name]
        for key, value in expected.items():
            assert torch.equal(grads[key], value), (name, key)
    # Collectives of a block's forward: with sequence parallelism at the entry and exit of mixer and MLP, otherwise only at
    # the exits.
    each = 2 if sequence_parallel else 1
    again = {name: count - least for name, count in counts.items()}
    assert again == {
        "none": 0,
        "full": BLOCKS * 2 * each,
        "full, early stop": BLOCKS * (2 * each - 1),
        "kept": 0,
        "not kept": BLOCKS * 2 * each,
        "mlp": BLOCKS * each,
        "mixer": BLOCKS * each,
    }


def test_torchtitan_s_policies_treat_both_lists_of_a_decoder_in_halves():
    from torchtitan.distributed.activation_checkpoint import FullAC

    model = Tiny()
    model.self_layers, model.cross_layers = (torch.nn.ModuleList([layer]) for layer in model.layers)
    del model.layers
    apply_activation_checkpointing(model, FullAC.Config())
    wrapped = {name for name, module in model.named_modules() if type(module).__name__ == "CheckpointWrapper"}
    assert wrapped == {"self_layers.0", "cross_layers.0"}
