"""Mistakes with the words of the plan language, each in a plan that is right without it: found, and placed.

The models are those of tests/language.py. A fault is another style at a key, or another method of the plan.
"""

from functools import partial

import language
import pytest
from faulty import installed, leaving
from language import (
    SIZE,
    WIDTH,
    ExpertsPlan,
    PackedPlan,
    RetentionPlan,
    SelectivePlan,
    StateSpacePlan,
    WholePlan,
    balanced,
    with_mixer,
    with_mlp,
)
from mutants import faults
from plainly import verify
from tiny import Tiny

from titanplans import PlanError, check_plan
from titanplans.split.collectives import sum_in_region, sum_ranks
from titanplans.split.parameters.local_parameters import hidden_bias
from titanplans.split.root_mean_square import root_ratio


def state_space():
    return with_mixer(language.StateSpace)


def packed():
    return with_mixer(language.Packed)


def selective():
    return with_mixer(language.Selective)


def retention():
    return with_mixer(language.Retention)


def experts():
    return with_mlp(language.Experts)


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


def of_the_neighbour(plan, style):
    """The rows are those of another rank."""
    return faults.other_head(style)


def with_bias(module, output):
    bias = hidden_bias(module)
    return output if bias is None else output + bias


def corrected(style, correct):
    """`style`, whose last hook is another: `correct(group, module, args, kwargs, output)`."""

    def install(right, module, border):
        right(module, border)
        module._forward_hooks.popitem()
        module.register_forward_hook(partial(correct, border.group), with_kwargs=True)

    return installed(style, install)


def own_statistic(plan, style):
    """Each rank divides by the root mean square of its own part."""
    return corrected(style, lambda group, module, args, kwargs, output: with_bias(module, output))


def statistic_without_gradient(plan, style):
    """The mean square of the others is a number, not a function of what they compute."""

    def correct(group, module, args, kwargs, output):
        x = (args[0] if style.statistic is None else style.statistic(*args, **kwargs)).detach()
        return with_bias(module, output * root_ratio(x, 1e-5, group))

    return corrected(style, correct)


def summed_twice(plan, style):
    def leave(border, module, output):
        return sum_ranks(with_bias(module, sum_in_region(output, border.group)), border.group)

    return leaving(style, leave)


def unsummed(plan, style):
    """Each rank goes on with its part of the sum."""
    return leaving(style, lambda border, module, output: with_bias(module, output))


def gradient_unsummed(plan, style):
    """Each rank takes its share of the sum's gradient for all of it."""
    return leaving(style, lambda border, module, output: with_bias(module, sum_ranks(output, border.group)))


def in_region(plan, style):
    return plan.replicated_in_region()


def off_stream(plan, style):
    return plan.replicated_off_stream()


def colwise(plan, style):
    return plan.colwise()


FOUND = {
    "a section's boundary one head further on": (
        state_space,
        with_style(StateSpacePlan, "in_proj", boundary_moved),
        2,
        "attn.conv1d",
    ),
    "sections in another order": (
        state_space,
        with_style(StateSpacePlan, "conv1d", in_another_order),
        2,
        "attn.conv1d",
    ),
    "another rank's rows": (
        state_space,
        with_style(StateSpacePlan, "conv1d", of_the_neighbour),
        4,
        "attn.conv1d",
    ),
    "a parameter of each head whole": (
        state_space,
        with_style(StateSpacePlan, "attn.D", in_region),
        2,
        "attn",
    ),
    "a statistic of one's own": (
        state_space,
        with_style(StateSpacePlan, "attn.norm", own_statistic),
        2,
        "attn.norm",
    ),
    "a statistic without gradient": (
        state_space,
        with_style(StateSpacePlan, "attn.norm", statistic_without_gradient),
        2,
        "layers.1.attn",
    ),
    "no statistic of what the gate gives": (
        state_space,
        with_style(StateSpacePlan, "attn.norm", lambda plan, style: plan.split_norm()),
        2,
        "attn.norm",
    ),
    "shared heads not counted by the norm": (
        packed,
        with_style(PackedPlan, "k_norm", lambda plan, style: plan.split_norm()),
        4,
        "attn.k_norm",
    ),
    "a norm over this rank's width": (packed, with_style(PackedPlan, "o_norm", colwise), 2, "attn.o_norm"),
    "a sum in the region that is missing": (
        selective,
        with_style(SelectivePlan, "x_proj", unsummed),
        2,
        "attn",
    ),
    "a sum in the region, twice": (
        selective,
        with_style(SelectivePlan, "x_proj", summed_twice),
        2,
        "attn.x_proj",
    ),
    "a sum in the region whose gradient is not summed": (
        selective,
        with_style(SelectivePlan, "x_proj", gradient_unsummed),
        2,
        "attn",
    ),
    "rows (n h d) split as if they were (h n d)": (
        retention,
        with_style(RetentionPlan, "k_proj", colwise),
        2,
        "attn.o_proj",
    ),
    "a decay by the number of a head on this rank": (
        retention,
        with_method(RetentionPlan, "local_functions", lambda self, attn: {}),
        2,
        "attn",
    ),
    "what scales the input not summed": (
        retention,
        with_style(RetentionPlan, "attn.scale", off_stream),
        2,
        "attn.scale",
    ),
    "experts split as if gate and up were one": (
        experts,
        with_style(ExpertsPlan, "gate_up_proj", lambda plan, style: plan.colwise(dim=1)),
        2,
        "mlp",
    ),
    "experts' biases added by each rank": (
        experts,
        with_style(ExpertsPlan, "down_bias", in_region),
        2,
        "mlp",
    ),
    "a router whose gradient is not summed": (
        experts,
        with_style(ExpertsPlan, "router", off_stream),
        2,
        "mlp.router",
    ),
    "the balance of experts counted by each rank": (
        balanced,
        with_method(ExpertsPlan, "model_functions", lambda self, model: {}),
        2,
        "mlp",
    ),
    "a whole mixer's gradients summed": (
        Tiny,
        with_style(WholePlan, "attn.q_proj", lambda plan, style: faults.summed_again(style)),
        2,
        "attn",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_found_and_placed(name):
    model, plan, degree, place = FOUND[name]
    report = verify(model, plan, degrees=[degree], sequence_parallel=True, loss_parallel=False)
    (case,) = report.cases
    assert not case.passed
    assert "TypeError" not in report.table(), "a fault is no mistake of this file's"
    named = case.worst if case.finding is None else case.finding.first.name
    assert place in named, f"{named}: {report.table()}"


@pytest.mark.parametrize("key", ["A_log", "D", "dt_bias", "in_proj", "conv1d", "norm"])
def test_a_key_that_is_left_out_is_refused_by_name(key):
    class Forgotten(StateSpacePlan):
        def attn_plan(self, attn):
            return {k: style for k, style in super().attn_plan(attn).items() if k != key}

    with pytest.raises(PlanError, match=rf"parameters? 'layers\.\*\.attn\.{key}"):
        check_plan(state_space(), 2, plan=Forgotten)
