"""Each style of the plan language is proved at two degrees, and a misuse says what to write instead."""

import copy
import re

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel

from tests.support.plain_proofs import verify_plain
from tests.support.plan_examples import (
    QKV,
    Experts,
    ExpertsPlan,
    GateUp,
    GateUpPlan,
    Packed,
    PackedPlan,
    QKVPlan,
    ReplicatedMixerPlan,
    Retention,
    RetentionPlan,
    Selective,
    SelectivePlan,
    StateSpace,
    StateSpacePlan,
    Unsized,
    balanced,
    with_mixer,
    with_mlp,
)
from tests.support.process_groups import run_on_threads
from tests.support.refusals import refusal
from tests.support.tiny_model import Tiny, TinyPlan, changed
from titanplans import Degrees, PlanError, TPOptions, TPPlan, apply_plan, check_plan
from titanplans.plan.custom import DictPlan
from titanplans.split.local_code import HeadRanks


class BiasBeforeSum(TinyPlan):
    """The sum is at the region's exit; each rank adds a fraction of the projection's bias."""

    def attn_plan(self, attn):
        return super().attn_plan(attn) | self.attn_region() | {"o_proj": self.rowwise(reduce_output=False)}


CORRECT = {
    "bias before the sum": (Tiny, BiasBeforeSum),
    "packed state space": (lambda: with_mixer(StateSpace), StateSpacePlan),
    "packed transposed": (lambda: with_mixer(Packed), PackedPlan),
    "sum in the region": (lambda: with_mixer(Selective), SelectivePlan),
    "function of a head's number": (lambda: with_mixer(Retention), RetentionPlan),
    "whole mixer": (Tiny, ReplicatedMixerPlan),
    "experts": (lambda: with_mlp(Experts), ExpertsPlan),
    "balance of experts": (balanced, ExpertsPlan),
}


@pytest.mark.parametrize("name", CORRECT)
def test_a_style_is_proved(name):
    model, plan = CORRECT[name]
    # The model's own computation with the logits can't use shards.
    loss = False if name == "balance of experts" else None
    torch.manual_seed(0)  # some parameters keep the initial values of their module
    report = verify_plain(model, plan, degrees=[2, 4], loss_parallel=loss)
    assert report.passed, str(report.table())
    assert len(report.cases) == (8 if loss is None else 4)
    gradients = (check for case in report.cases for check in case.checks if check.what == "gradients")
    assert max(check.error for check in gradients) < 10  # the tolerance is some hundred


def renamed(model, name):
    """Return `model` with the mixers of its blocks renamed to `name`; it is never run."""
    for block in model.layers:
        block.add_module(name, block._modules.pop("attn"))
    return model


def built(kind):
    return (
        kind()
        if not isinstance(kind, type)
        else (with_mlp if kind in (GateUp, Experts) else with_mixer)(kind)
    )


def of_functions(**functions):
    """Return the plan of QKV with methods replaced by functions that return these values."""
    return changed(
        QKVPlan, **{name: lambda self, module, value=value: value for name, value in functions.items()}
    )


MISUSED = {
    "a parameter without a key": (
        StateSpace, changed(StateSpacePlan, lambda plan: {"A_log": None}),
        "parameter 'layers.*.attn.A_log' (4,) of StateSpace (the style of 'layers.*.attn' is for the module's output",
    ),
    "a key that names nothing": (
        StateSpace, changed(StateSpacePlan, lambda plan: {"A": plan.colwise()}),
        ": layers.0.attn (StateSpace) has in_proj, conv1d, norm, out_proj, A_log, D, dt_bias",
    ),
    "a function that nobody calls": (
        Retention, changed(RetentionPlan, local_functions=lambda plan, attn: {"causal.decay": None}),
        "its plan's local_functions has 'causal.decay', but no method of Retention",
    ),
    "a region for a parameter": (
        StateSpace, changed(StateSpacePlan, lambda plan: {"D": plan.attn_region()[""]}),
        "'layers.0.attn.D' (Region on StateSpace): it works on a module",
    ),
    "a sum for a parameter": (
        Experts, changed(ExpertsPlan, mlp=lambda plan: {"down_proj": plan.rowwise(dim=2)}),
        "a single parameter has no output to reduce: use rowwise(reduce_output=False)",
    ),
    "a sum inside for numbers": (
        StateSpace, changed(StateSpacePlan, lambda plan: {"D": plan.rowwise_in_region()}),
        "it is not a weight [outputs, inputs]",
    ),
    "a packed projection split as one": (
        QKV, changed(QKVPlan, lambda plan: {"qkv_proj": plan.colwise()}),
        "16 + 16 + 16, which even shards would split across section boundaries: write self.packed(16, 16, 16)",
    ),
    "a packed projection of a mixer without head_dim": (
        Unsized, changed(QKVPlan, lambda plan: {"qkv_proj": plan.colwise()}),
        "its 48 rows look like queries, keys and values packed",
    ),
    "an MLP under other names": (
        GateUp, changed(TinyPlan, mlp=lambda plan: {"up_proj": plan.colwise()}),
        "(GateUp) has gate_up_proj, down_proj: set mlp_in and mlp_out in Changed",
    ),
    "gate and up split as one": (
        GateUp, changed(GateUpPlan, mlp=lambda plan: {"gate_up_proj": plan.colwise()}),
        "its 48 rows look like gate and up packed",
    ),
    "gate and up of experts split as one": (
        Experts, changed(ExpertsPlan, mlp=lambda plan: {"gate_up_proj": plan.colwise(dim=1)}),
        "its 16 rows look like gate and up packed into one projection, 8 + 8, which even shards would "
        "split across section boundaries: write self.packed(8, 8, dim=1)",
    ),
    "a convolution of sections split as one": (
        StateSpace, changed(StateSpacePlan, lambda plan: {"conv1d": plan.colwise()}),
        "its 36 rows look like sections of layers.0.attn.in_proj packed into one projection, 24 + 6 + 6, which even shards "
        "would split across section boundaries: write self.packed(24, self.shared_heads(6, 2), self.shared_heads(6, 2))",
    ),
    "sections that don't add up": (
        GateUp, changed(GateUpPlan, mlp=lambda plan: {"gate_up_proj": plan.packed(24, 12)}),
        "its sections (24, 12) add up to 36, but dimension 0 of weight is 48",
    ),
    "a section that the degree does not divide": (
        GateUp, GateUpPlan, "tensor_parallel_degree = 5 does not divide num_heads = 4", 5
    ),
    "an attribute that is not there": (
        QKV, of_functions(local_attributes={"num_head": 2}),
        "its plan's local_attributes has 'num_head', but QKV has no 'num_head'",
    ),
    "a count that the mixer does not have": (
        QKV, changed(QKVPlan, local_attributes=lambda self, attn: self.divide_by_degree(attn, "n_heads")),
        "QKV has no n_heads, which Changed divides",
    ),
    "a block that calls its mixer otherwise": (
        lambda: renamed(with_mixer(QKV), "token_mixer"), QKVPlan,
        "return the keys of 'token_mixer' from layer_plan(layer)",
    ),
    "a count that the degree does not divide": (
        QKV, changed(QKVPlan, local_attributes=lambda self, attn: self.divide_by_degree(attn, "odd")),
        "QKV.odd = 3 is not a multiple of tensor_parallel_degree = 2",
    ),
    "a function that is not called": (
        QKV, of_functions(local_functions={"decay": lambda function, ranks: function}),
        "its plan's local_functions has 'decay', but no method of QKV",
    ),
    "an attribute that an MLP does not have": (
        QKV, of_functions(mlp_attributes={"up_proj.width": 2}),
        "layers.0.mlp (MLP): its plan's mlp_attributes has 'up_proj.width', but Linear has no 'width'",
    ),
    "an attribute that the model does not have": (
        QKV, of_functions(model_attributes={"heads": 2}),
        "the model (Tiny): its plan's model_attributes has 'heads', but Tiny has no 'heads'",
    ),
    "a function that a module of the model does not call": (
        QKV, of_functions(model_functions={"norm.decay": lambda function, ranks: function}),
        "norm (RMSNorm): its plan's model_functions has 'norm.decay', but no method of RMSNorm",
    ),
    "a function of a module that the model does not have": (
        QKV, of_functions(model_functions={"base.decay": lambda function, ranks: function}),
        "the model (Tiny): its plan's model_functions has 'base.decay', but the model has no module 'base'",
    ),
    "a norm that subtracts a mean": (
        Packed, changed(PackedPlan, lambda plan: {"o_norm": plan.split_norm()}), "it subtracts a mean"
    ),
}  # fmt: skip
"""By case: the model or module class, the plan, a fragment of the error, and the degree if it is not 2."""


@pytest.mark.parametrize("name", MISUSED)
def test_a_misuse_is_refused_in_one_sentence(name):
    kind, plan, message, degree, *_ = *MISUSED[name], 2
    assert message in refusal(check_plan, built(kind), Degrees(tp=degree), plan=plan, kind=PlanError)


def test_a_convolution_that_keeps_the_groups_of_all_ranks_is_refused():
    def without_its_groups(self, attn):
        attributes = StateSpacePlan.local_attributes(self, attn)
        return {name: value for name, value in attributes.items() if name != "conv1d.groups"}

    with pytest.raises(PlanError) as error:
        verify_plain(
            lambda: with_mixer(StateSpace),
            changed(StateSpacePlan, local_attributes=without_its_groups),
            degrees=[2],
        )
    assert re.match(
        r"plan key 'layers.0.attn.conv1d' \(Packed on Conv1d\): its groups = 36 .* 18 channels: .*'conv1d.groups'",
        str(error.value),
    )


def norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-5):
    """A norm and the following projection in one kernel, as FLA's `rms_norm_linear`."""


@pytest.mark.parametrize("bias", ["norm_bias", "linear_bias"])
def test_a_bias_in_the_kernel_of_norm_and_projection_is_refused(bias):
    function = TPPlan.full_width_norm(norm_linear, HeadRanks(0, 2, ("none", 2), None, (0, 1)))
    biases = {"norm_bias": None, "linear_bias": None} | {bias: torch.ones(4)}
    with pytest.raises(PlanError, match=rf"norm_linear: .*takes no {bias}"):
        function(torch.ones(1, 4), norm_weight=torch.ones(4), linear_weight=torch.ones(2, 4), **biases)


def test_a_style_of_torch_for_a_parameter_is_refused():
    plan = changed(StateSpacePlan, lambda plan: {"D": ColwiseParallel()})
    with pytest.raises(PlanError, match=r"names a parameter, .*not ColwiseParallel"):
        check_plan(with_mixer(StateSpace), Degrees(tp=2), plan=plan)


def test_packed_weights_keep_their_values_and_are_sharded_in_memory():
    """Optimizers, FSDP2 and checkpoints see a DTensor with the full values in their original order; a rank stores a
    shard."""
    unsplit = with_mixer(Packed)
    before = {name: param.detach().clone() for name, param in unsplit.named_parameters()}

    def work(world):
        model = copy.deepcopy(unsplit)
        apply_plan(model, world.mesh, plan=PackedPlan)
        packed = model.get_submodule("layers.0.attn.c_attn")
        weight = packed._parameters["weight"]
        assert weight.to_local().shape == (8, 48)
        assert packed.weight is weight, "outside of the forward it is the parameter"
        return {name: param.full_tensor().detach() for name, param in model.named_parameters()}

    after = run_on_threads(work)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_dict_may_name_parameters():
    """The styles are strings, as in a job's TOML."""
    plan = DictPlan(
        TPOptions(Degrees(tp=2)), {"layers.*.attn.A_log": "colwise", "layers.*.attn.norm": "split_norm"}
    )
    styles = plan.full_plan(with_mixer(StateSpace))
    assert type(styles["layers.1.attn.A_log"]).__name__ == "Colwise"
    assert type(styles["layers.0.attn.norm"]).__name__ == "SplitNorm"
