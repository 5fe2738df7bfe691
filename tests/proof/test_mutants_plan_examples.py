"""Mistakes with the words of the plan language, each in a plan that is right without it: found, and placed.

The models are those of tests/support/plan_examples.py. A fault is another style at a key, or another method of the plan.
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
    RetentionPlan,
    SelectivePlan,
    StateSpacePlan,
    ReplicatedMixerPlan,
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
    """Return `plan` with the style of each key that ends in `key` changed: `change(the plan, the style)`."""

    class Changed(plan):
        def full_plan(self, model):
            return {k: change(self, s) if k.endswith(key) else s for k, s in super().full_plan(model).items()}

    return Changed


def with_method(plan, name, method):
    """Return `plan` with another method."""
    return type("Changed", (plan,), {name: method})


GROUP = 6  # rows of B, and of C


def boundary_moved(plan, style):
    """One head of x is taken for z's."""
    return faults.with_option(style, sections=(WIDTH + SIZE, WIDTH - SIZE, *style.sections[2:]))


def in_another_order(plan, style):
    """The sections are read in another order than the code cuts them."""
    return faults.with_rows(style, lambda rows: rows._replace(runs=(*rows.runs[1:], rows.runs[0])))


def corrected(style, correct):
    """Return `style` with `correct(group, module, args, kwargs, output)` in place of its last hook."""

    def install(right, module, border):
        right(module, border)
        module._forward_hooks.popitem()
        module.register_forward_hook(partial(correct, border.group), with_kwargs=True)

    return installed(style, install)


def own_statistic(plan, style):
    """Each rank divides by the root mean square of its own part."""
    return corrected(style, lambda group, module, args, kwargs, output: add_deferred_bias(module, output))


def statistic_without_gradient(plan, style):
    """The mean square of the other ranks enters without a gradient."""

    def correct(group, module, args, kwargs, output):
        x = (args[0] if style.statistic is None else style.statistic(*args, **kwargs)).detach()
        return add_deferred_bias(module, output * root_ratio(x, 1e-5, group))

    return corrected(style, correct)


def summed_twice(plan, style):
    def leave(border, module, output):
        return sum_ranks(add_deferred_bias(module, sum_in_region(output, border.group)), border.group)

    return leaving(style, leave)


def unsummed(plan, style):
    """Each rank goes on with its part of the sum."""
    return leaving(style, lambda border, module, output: add_deferred_bias(module, output))


def gradient_unsummed(plan, style):
    """Each rank takes its share of the sum's gradient for the whole gradient."""
    return leaving(
        style, lambda border, module, output: add_deferred_bias(module, sum_ranks(output, border.group))
    )


def by(name):
    """Return the fault that puts the plan's style `name` there."""
    return lambda plan, style: getattr(plan, name)()


def fault(change):
    """Return a fault of mutants/faults.py in the form that FOUND needs."""
    return lambda plan, style: change(style)


of_the_neighbour, summed_again = fault(faults.other_head), fault(faults.summed_again)
in_region, off_stream = by("replicated_in_region"), by("replicated_off_stream")
colwise, own_norm = by("colwise"), by("split_norm")


FOUND = {
    "a section's boundary one head further on": (state_space, StateSpacePlan, "in_proj", boundary_moved, "attn.conv1d"),
    "sections in another order": (state_space, StateSpacePlan, "conv1d", in_another_order, "attn.conv1d"),
    "another rank's rows": (state_space, StateSpacePlan, "conv1d", of_the_neighbour, "attn.conv1d"),
    "a parameter of each head whole": (state_space, StateSpacePlan, "attn.D", in_region, "attn"),
    "a statistic of one's own": (state_space, StateSpacePlan, "attn.norm", own_statistic, "attn.norm"),
    "a statistic without gradient": (
        state_space, StateSpacePlan, "attn.norm", statistic_without_gradient, "layers.1.attn"
    ),
    "no statistic of what the gate gives": (state_space, StateSpacePlan, "attn.norm", own_norm, "attn.norm"),
    "shared heads not counted by the norm": (packed, PackedPlan, "k_norm", own_norm, "attn.k_norm"),
    "a norm over this rank's width": (packed, PackedPlan, "o_norm", colwise, "attn.o_norm"),
    "a sum in the region that is missing": (selective, SelectivePlan, "x_proj", unsummed, "attn"),
    "a sum in the region, twice": (selective, SelectivePlan, "x_proj", summed_twice, "attn.x_proj"),
    "a sum in the region whose gradient is not summed": (
        selective, SelectivePlan, "x_proj", gradient_unsummed, "attn"
    ),
    "rows (n h d) split as if they were (h n d)": (retention, RetentionPlan, "k_proj", colwise, "attn.o_proj"),
    "what scales the input not summed": (retention, RetentionPlan, "attn.scale", off_stream, "attn.scale"),
    "experts' biases added by each rank": (experts, ExpertsPlan, "down_bias", in_region, "mlp"),
    "a router whose gradient is not summed": (experts, ExpertsPlan, "router", off_stream, "mlp.router"),
    "a whole mixer's gradients summed": (Tiny, ReplicatedMixerPlan, "attn.q_proj", summed_again, "attn"),
    "a decay by the number of a head on this rank": (retention, RetentionPlan, "local_functions", None, "attn"),
    "the balance of experts counted by each rank": (balanced, ExpertsPlan, "model_functions", None, "mlp"),
}  # fmt: skip
"""Model, plan, key, fault and place; without a fault the key is a method of the plan that is left out."""
SHARED = ("another rank's rows", "shared heads not counted by the norm")
"""At degree 4, where ranks share heads."""


BY_TOKENS = {
    "a section's boundary one head further on": ("cp",),
    "a parameter of each head whole": ("cp", "tp x cp"),
    "no statistic of what the gate gives": ("cp", "tp x cp"),
    "a norm over this rank's width": ("cp", "tp x cp"),
    "rows (n h d) split as if they were (h n d)": ("cp", "tp x cp"),
    "a decay by the number of a head on this rank": ("cp", "tp x cp"),
    "shared heads not counted by the norm": ("tp x cp",),
    "what scales the input not summed": ("tp x cp",),  # over cp alone every gradient is a part
    "experts' biases added by each rank": ("tp x cp",),
    "a router whose gradient is not summed": ("tp x cp",),
}
"""Where these are wrong with context parallelism, too. A fault of a style's installation is one of the cut by weights."""


def wronged(name, degree, context=1):
    """Return the report of a fault of `FOUND`, and where it has to be placed."""
    model, plan, key, change, place = FOUND[name]
    wrong = with_style(plan, key, change) if change else with_method(plan, key, lambda self, module: {})
    options = dict(sequence_parallel=True, loss_parallel=False)
    return verify_plain(model, wrong, degrees=[Degrees(tp=degree, cp=context)], **options), place


def placed(report):
    """Return the place that a report of one case names."""
    (case,) = report.cases
    assert not case.passed
    assert "TypeError" not in report.table(), "a fault is no mistake of this file's"
    return case.worst if case.finding is None else case.finding.first.name


@pytest.mark.parametrize("name", FOUND)
def test_it_is_found_and_placed(name):
    report, place = wronged(name, degree=4 if name in SHARED else 2)
    assert place in placed(report), report.table()


@pytest.mark.parametrize(("name", "cut"), [(name, cut) for name, cuts in BY_TOKENS.items() for cut in cuts])
def test_it_is_found_and_placed_by_tokens(name, cut):
    report, place = wronged(name, degree=1 if cut == "cp" else 2, context=2)
    assert place in placed(report), report.table()


@pytest.mark.parametrize("key", ["A_log", "D", "dt_bias", "in_proj", "conv1d", "norm"])
def test_a_key_that_is_left_out_is_refused_by_name(key):
    with pytest.raises(PlanError, match=rf"parameters? 'layers\.\*\.attn\.{key}"):
        check_plan(state_space(), Degrees(tp=2), plan=changed(StateSpacePlan, lambda plan: {key: None}))
