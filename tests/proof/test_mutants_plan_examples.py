"""Faults in the plans of tests/support/plan_examples.py: each is rejected, and its module named.

A fault is another style at a key, or another method of the plan.
"""

from functools import partial

import pytest

from tests.support import plan_examples
from tests.support.faulty_styles import installed, leaving
from tests.support.mutants import faults
from tests.support.plain_proofs import verify_plain
from tests.support.plan_examples import (
    SIZE,
    WIDTH,
    ExpertsPlan,
    PackedPlan,
    ReplicatedMixerPlan,
    RetentionPlan,
    SelectivePlan,
    StateSpacePlan,
    balanced,
    with_mixer,
    with_mlp,
)
from tests.support.tiny_model import Tiny, changed
from titanplans import Degrees, PlanError, check_plan
from titanplans.split.collectives import sum_in_region, sum_ranks
from titanplans.split.module_weight import add_deferred_bias
from titanplans.split.root_mean_square import root_ratio

pytestmark = pytest.mark.thorough

state_space, packed, selective, retention = (
    partial(with_mixer, mixer)
    for mixer in (
        plan_examples.StateSpace,
        plan_examples.Packed,
        plan_examples.Selective,
        plan_examples.Retention,
    )
)
experts = partial(with_mlp, plan_examples.Experts)


def with_style(plan, key, change):
    """Return `plan` with `change(plan, style)` at each key that ends in `key`."""

    class Changed(plan):
        def full_plan(self, model):
            return {k: change(self, s) if k.endswith(key) else s for k, s in super().full_plan(model).items()}

    return Changed


def with_method(plan, name, method):
    """Return `plan` with another method."""
    return type("Changed", (plan,), {name: method})


GROUP = 6  # rows of B, and of C


def boundary_moved(plan, style):
    """The section z has the rows of one more head, which belong to x."""
    return faults.with_option(style, sections=(WIDTH + SIZE, WIDTH - SIZE, *style.sections[2:]))


def in_another_order(plan, style):
    """The sections are in another order than the model's code splits them."""
    return faults.with_rows(style, lambda rows: rows._replace(runs=(*rows.runs[1:], rows.runs[0])))


def corrected(style, correct):
    """Return `style` whose last hook is replaced by `correct(group, module, args, kwargs, output)`."""

    def install(original, module, border):
        original(module, border)
        module._forward_hooks.popitem()
        module.register_forward_hook(partial(correct, border.group), with_kwargs=True)

    return installed(style, install)


def local_statistic(plan, style):
    """Each rank divides by the root mean square of its own slice."""
    return corrected(style, lambda group, module, args, kwargs, output: add_deferred_bias(module, output))


def statistic_without_gradient(plan, style):
    """The mean square of the other ranks has no gradient."""

    def correct(group, module, args, kwargs, output):
        x = (args[0] if style.statistic is None else style.statistic(*args, **kwargs)).detach()
        return add_deferred_bias(module, output * root_ratio(x, 1e-5, group))

    return corrected(style, correct)


def summed_twice(plan, style):
    def leave(border, module, output):
        return sum_ranks(add_deferred_bias(module, sum_in_region(output, border.group)), border.group)

    return leaving(style, leave)


def unsummed(plan, style):
    """Each rank continues with its own partial sum, which is not reduced."""
    return leaving(style, lambda border, module, output: add_deferred_bias(module, output))


def gradient_unsummed(plan, style):
    """The gradient of each rank's partial sum is not summed over the ranks."""
    return leaving(
        style, lambda border, module, output: add_deferred_bias(module, sum_ranks(output, border.group))
    )


def by(name):
    """Return the fault that uses the plan's style `name` instead."""
    return lambda plan, style: getattr(plan, name)()


def fault(change):
    """Return a fault of mutants/faults.py as a function of plan and style, as FAULTS has them."""
    return lambda plan, style: change(style)


of_other_head, summed_again = fault(faults.other_head), fault(faults.summed_again)
in_region, off_stream = by("replicated_in_region"), by("replicated_off_stream")
colwise, split_norm = by("colwise"), by("split_norm")


FAULTS = {
    "a section boundary shifted by one head": (state_space, StateSpacePlan, "in_proj", boundary_moved, "attn.conv1d"),
    "sections in another order": (state_space, StateSpacePlan, "conv1d", in_another_order, "attn.conv1d"),
    "another rank's rows": (state_space, StateSpacePlan, "conv1d", of_other_head, "attn.conv1d"),
    "a replicated parameter per head": (state_space, StateSpacePlan, "attn.D", in_region, "attn"),
    "a statistic of the local slice": (state_space, StateSpacePlan, "attn.norm", local_statistic, "attn.norm"),
    "a statistic without gradient": (
        state_space, StateSpacePlan, "attn.norm", statistic_without_gradient, "layers.1.attn"
    ),
    "a norm without the statistic of its gated input": (state_space, StateSpacePlan, "attn.norm", split_norm, "attn.norm"),
    "shared heads not counted by the norm": (packed, PackedPlan, "k_norm", split_norm, "attn.k_norm"),
    "a norm over this rank's width": (packed, PackedPlan, "o_norm", colwise, "attn.o_norm"),
    "a missing sum in the region": (selective, SelectivePlan, "x_proj", unsummed, "attn"),
    "a sum in the region, twice": (selective, SelectivePlan, "x_proj", summed_twice, "attn.x_proj"),
    "a sum in the region whose gradient is not summed": (
        selective, SelectivePlan, "x_proj", gradient_unsummed, "attn"
    ),
    "rows (n h d) split as if they were (h n d)": (retention, RetentionPlan, "k_proj", colwise, "attn.o_proj"),
    "gradient of the input scale not summed": (retention, RetentionPlan, "attn.scale", off_stream, "attn.scale"),
    "experts' biases added by each rank": (experts, ExpertsPlan, "down_bias", in_region, "mlp"),
    "a router whose gradient is not summed": (experts, ExpertsPlan, "router", off_stream, "mlp.router"),
    "gradients of a replicated mixer summed": (Tiny, ReplicatedMixerPlan, "attn.q_proj", summed_again, "attn"),
    "a decay by the local index of a head": (retention, RetentionPlan, "local_functions", None, "attn"),
    "the balance of experts counted by each rank": (balanced, ExpertsPlan, "model_functions", None, "mlp"),
}  # fmt: skip
"""By name: model, plan, key, fault and the module to name. Without a fault, the key is a method that is removed."""
SHARED = ("another rank's rows", "shared heads not counted by the norm")
"""Proved at degree 4, where ranks share heads."""


BY_TOKENS = {
    "a section boundary shifted by one head": ("cp",),
    "a replicated parameter per head": ("cp", "tp x cp"),
    "a norm without the statistic of its gated input": ("cp", "tp x cp"),
    "a norm over this rank's width": ("cp", "tp x cp"),
    "rows (n h d) split as if they were (h n d)": ("cp", "tp x cp"),
    "a decay by the local index of a head": ("cp", "tp x cp"),
    "shared heads not counted by the norm": ("tp x cp",),
    "gradient of the input scale not summed": ("tp x cp",),  # over cp alone every gradient is summed
    "experts' biases added by each rank": ("tp x cp",),
    "a router whose gradient is not summed": ("tp x cp",),
}
"""The degrees at which these faults are wrong, with context parallelism, too. All other faults affect only TP."""


def rejected(name, degree, context=1):
    """Return the report of a fault of `FAULTS`, and the module that it has to name."""
    model, plan, key, change, place = FAULTS[name]
    wrong = with_style(plan, key, change) if change else with_method(plan, key, lambda self, module: {})
    options = dict(sequence_parallel=True, loss_parallel=False)
    return verify_plain(model, wrong, degrees=[Degrees(tp=degree, cp=context)], **options), place


def named_module(report):
    """Return the module that a report of one case names."""
    (case,) = report.cases
    assert not case.passed
    assert "TypeError" not in report.table(), "the fault is an error in this test"
    return case.worst if case.finding is None else case.finding.first.name


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_rejected_with_its_module(name):
    report, module = rejected(name, degree=4 if name in SHARED else 2)
    assert module in named_module(report), report.table()


@pytest.mark.parametrize(
    ("name", "split"), [(name, split) for name, splits in BY_TOKENS.items() for split in splits]
)
def test_a_fault_under_context_parallelism_is_rejected_with_its_module(name, split):
    report, module = rejected(name, degree=1 if split == "cp" else 2, context=2)
    assert module in named_module(report), report.table()


@pytest.mark.parametrize("key", ["A_log", "D", "dt_bias", "in_proj", "conv1d", "norm"])
def test_a_missing_key_is_refused_by_name(key):
    with pytest.raises(PlanError, match=rf"parameters? 'layers\.\*\.attn\.{key}"):
        check_plan(state_space(), Degrees(tp=2), plan=changed(StateSpacePlan, lambda plan: {key: None}))
