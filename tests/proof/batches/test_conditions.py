"""The conditions that a proof covers: every pair of conditions of a batch, and of a case. A failing case is reduced to the
conditions that it needs."""

import inspect
import itertools
import re
from dataclasses import fields, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support.mutants import faults
from tests.support.plain_proofs import verify_sharded
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import Degrees, PlanError, TPOptions
from titanplans.errors import KernelError
from titanplans.proof import verify
from titanplans.proof.batches.conditions import FROZEN, PLAIN, MicroBatch, Scenario, words
from titanplans.proof.batches.cover import cover, trainings
from titanplans.proof.batches.sample import Sampler
from titanplans.proof.batches.script import write_script
from titanplans.proof.compare.refused import leave_out_what_is_refused
from titanplans.proof.explain.blame import simpler
from titanplans.proof.verify import accepted_cases
from titanplans.split.layout import StreamLayout

TRAINED = trainings(MicroBatch(), 128)
GRID = [
    TPOptions(Degrees(tp=degree), loss, sequence)
    for degree in (2, 4, 8)
    for loss in (True, False)
    for sequence in (True, False)
]


def others(batch):
    return batch.ignored, batch.repeated, batch.text


def pairs(table):
    return {pair for values in table for pair in itertools.combinations(enumerate(values), 2)}


def test_the_batches_hold_every_pair_of_conditions():
    batches = [batch for training in TRAINED for step in training.steps for batch in step]
    long = {128: 130}  # a full block, or two tokens more
    table = [
        (b.size, long.get(b.length, b.length), b.padding or ("documents" if b.documents else ""), *others(b))
        for b in batches
    ]
    levels = [(1, 2, 3), (3, 15, 16, 130), ("", "left", "right", "documents"), *[(False, True)] * 3]
    assert pairs(itertools.product(*levels)) == pairs(table)


def test_the_micro_batches_of_a_step_differ_in_length():
    for training in TRAINED:
        assert len(training.steps) >= 2
        for first, second in training.steps:
            assert first.length != second.length


def test_evaluations_hold_each_kind_of_padding_and_the_lengths_at_the_ends():
    batches = [batch for training in TRAINED for batch in training.evaluated]
    assert {(b.padding, b.documents) for b in batches} == {
        ("left", False), ("right", False), ("", True), ("", False),
    }  # fmt: skip
    assert {b.length for b in batches} == {3, 15, 131}
    assert {b.size for b in batches} == {1, 2, 3}


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_context_parallel_ranks_divide_the_length_except_in_evaluations(shards):
    shared = trainings(MicroBatch(), 128, shards)
    assert len(shared) == len(TRAINED)
    for sharded, plain in zip(shared, TRAINED, strict=True):
        for step, of_plain in zip(sharded.steps, plain.steps, strict=True):
            assert all(batch.length % shards == 0 for batch in step)
            assert len({batch.length for batch in step}) == len({batch.length for batch in of_plain}) == 2
            assert [replace(b, length=0) for b in step] == [replace(b, length=0) for b in of_plain]
        assert sharded.evaluated[1:] == plain.evaluated[1:]
    assert {batch.length % 2 for sharded in shared for batch in sharded.evaluated[1:]} == {1}


def test_the_first_training_holds_each_condition():
    """A quick proof has only the first training, so this training has to cover each condition."""
    batches = [batch for step in TRAINED[0].steps for batch in step]
    for field in fields(MicroBatch):
        of_first = {getattr(batch, field.name) for batch in batches}
        of_all = {
            getattr(batch, field.name) for training in TRAINED for step in training.steps for batch in step
        }
        assert of_first == of_all - {128}  # only one training has the length of a full block


def settings(case):
    options, scenario = case
    return (
        options.degrees.tp, options.loss_parallel, options.sequence_parallel, scenario.steps, bool(scenario.frozen),
        scenario.recomputed, scenario.differing,
    )  # fmt: skip


def test_cases_hold_every_choice_of_options_and_every_pair():
    cases = cover(GRID, TRAINED, TRAINED, ("float64", "float32", "bfloat16"))
    in_float64 = [case for case in cases if case[1].dtype == "float64"]
    assert {options for options, _ in in_float64} == set(GRID)
    levels = [(2, 4, 8), *[(True, False)] * 2, [t.steps for t in TRAINED], *[(True, False)] * 3]
    assert pairs(itertools.product(*levels)) == pairs(map(settings, in_float64))
    levels[0] = (2,)
    for dtype in ("float32", "bfloat16"):
        singles = {value for case in cases if case[1].dtype == dtype for value in enumerate(settings(case))}
        assert singles == {(at, value) for at, level in enumerate(levels) for value in level}
    assert len(cases) < 22


def test_a_quick_cover_has_each_condition_once():
    cases = cover(GRID, TRAINED[:1], TRAINED[:1], ("float64",), quick=True)
    assert len(cases) == 2
    first, second = map(settings, cases)
    assert first[0] == second[0] == 2
    assert all(a != b for a, b in zip(first[1:3] + first[4:], second[1:3] + second[4:], strict=True))


def test_cases_over_tp_and_cp_hold_every_pair_of_their_conditions():
    """tp 2 x cp 2 counts as tp 2 with one more condition, context parallelism."""
    options = [replace(each, degrees=replace(each.degrees, cp=2)) for each in GRID if each.degrees.tp == 2]
    grid = [*(each for each in GRID if each.degrees.tp == 2), *options]
    cases = [case for case in cover(grid, TRAINED, TRAINED, ("float64",)) if case[0].degrees.cp == 2]
    levels = [(2,), *[(True, False)] * 2, [t.steps for t in TRAINED], *[(True, False)] * 3]
    expected = {pair for pair in pairs(itertools.product(*levels)) if 0 in (at for at, _ in pair)}
    assert expected <= pairs(map(settings, cases))
    assert {each for each, _ in cases} == set(options)
    assert len(cases) < 8


def test_options_of_tensor_parallelism_are_proved_with_cp_only_if_tp_splits_weights():
    def chosen(tp, cp, *requested):
        accepted, _ = accepted_cases(Tiny(), TinyPlan, [Degrees(tp=tp, cp=cp)], *requested, named=True)
        return [(each.loss_parallel, each.sequence_parallel) for each in accepted]

    every = [*itertools.product((True, False), repeat=2)]
    assert chosen(2, 1, None, None) == chosen(2, 2, None, None) == every
    assert chosen(1, 2, None, None) == [(True, True)], "without TP the options change nothing"
    assert chosen(1, 2, False, None) == [(False, True)]
    assert chosen(2, 2, None, False) == [(True, False), (False, False)]


def test_a_plan_that_is_wrong_without_sequence_parallelism_is_rejected_over_tp_and_cp():
    class Plan(TinyPlan):
        def layer_plan(self, layer):  # the gradient of a norm is summed for both kinds of stream
            norm = faults.on_stream(self.replicated_on_stream(), StreamLayout(1))
            return super().layer_plan(layer) | {"mlp_norm": norm}

    report = verify(Tiny, Plan, degrees=[Degrees(tp=2, cp=2)])
    wrong = {case.options.sequence_parallel for case in report.cases if not case.passed}
    assert wrong == {False}
    assert {case.finding.first.name for case in report.cases if not case.passed} == {
        "layers.1.mlp_norm.weight"
    }


def test_every_condition_can_be_removed():
    for training in TRAINED:
        scenario = Scenario(
            training.steps, TRAINED[0].evaluated, True, FROZEN[1], True, True, True, "bfloat16"
        )
        assert len(words(scenario, PLAIN)) > 10
        assert simpler(scenario, PLAIN, lambda _: True) == PLAIN
        assert simpler(scenario, PLAIN, lambda _: False) == scenario
    assert not words(PLAIN, PLAIN)


@pytest.mark.parametrize(
    ("is_needed", "named"),
    [
        (lambda s: any(b.padding == "left" for step in s.steps for b in step), ("left padding",)),
        (
            lambda s: any(b.length > 64 and b.ignored for step in s.steps for b in step),
            ("130 tokens", "ignored labels"),
        ),
        (lambda s: len(s.steps) > 1, ("2 steps",)),
        (lambda s: any(len(step) > 1 for step in s.steps), ("several micro batches in a step",)),
        (lambda s: s.frozen and s.dtype == "bfloat16", ("frozen parameters", "bfloat16")),
        (
            lambda s: s.evaluated and any(b.size == 3 for step in s.steps for b in step),
            ("a batch of 3", "an evaluation"),
        ),
        (lambda s: any(b.padding == "right" for b in s.evaluated), ("right padding", "an evaluation")),
    ],
)
def test_only_the_needed_conditions_remain(is_needed, named):
    first = TRAINED[0]
    scenario = Scenario(first.steps, first.evaluated, True, FROZEN[1], True, True, True, "bfloat16")
    assert words(simpler(scenario, PLAIN, is_needed), PLAIN) == named


def test_batches_have_their_conditions():
    class Masked(Tiny):
        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return super().forward(input_ids)

    sampler = Sampler(Masked(), None, 1, seed=0)
    assert list(sampler.uncovered) == ["a forward with a cache: its forward takes no use_cache"]
    for padding, side in (("left", 0), ("right", -1)):
        sample = sampler.sample(MicroBatch(3, 15, padding=padding, ignored=True), 1, None)
        mask = sample.inputs["attention_mask"]
        assert mask.shape == sample.labels.shape == (3, 15)
        assert (mask[:, side] == 0).all()
        assert (mask[:, -1 - side] == 1).all()
        assert len(mask.sum(1).unique()) > 1
        assert (sample.labels[mask == 0] == -100).all()
        assert (sample.labels[mask == 1] == -100).any()
    ids = sampler.tokens(MicroBatch(2, 16, documents=True), 2)["position_ids"]
    assert all((sequence == 0).sum() == 2 and sequence.max() < 15 for sequence in ids)
    assert len(sampler.tokens(MicroBatch(repeated=True), 3)["input_ids"].unique()) <= 3

    class Packed(Tiny):
        def forward(self, input_ids, cu_seqlens=None):
            return super().forward(input_ids)

    inputs = Sampler(Packed(), None, 1, seed=0).tokens(MicroBatch(3, 15, documents=True), 0)
    assert inputs["input_ids"].shape == (1, 45)
    ends = inputs["cu_seqlens"]
    assert (ends[0], ends[-1], len(ends)) == (0, 45, 7)
    assert (ends.diff() > 0).all()


def without_line_numbers(reasons):
    return {re.sub(r":\d+\)$", ")", reason) for reason in reasons}


def test_conditions_that_a_model_refuses_are_left_out_and_reported():
    """A mixer like PaTH attention, which accepts padding and a cache only in evaluation, and a cache only with a mask."""

    class Careful(Tiny):
        def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
            assert attention_mask is None or not self.training, "no mask in training"
            assert not use_cache, "no cache"
            return super().forward(input_ids)

    class Modest(Tiny):
        def forward(
            self, input_ids, attention_mask=None, past_key_values=None, use_cache=False, cu_seqlens=None
        ):
            if cu_seqlens is not None:
                raise NotImplementedError("no documents")
            assert attention_mask is None or past_key_values is None, "no mask with a cache"
            return SimpleNamespace(
                logits=super().forward(input_ids).logits, past_key_values=use_cache or None
            )

    report = verify_sharded(Modest, TinyPlan, conditions="each")
    assert report.passed, report.table()
    assert {
        "documents in a sequence: its forward refuses cu_seqlens: NotImplementedError: no documents "
        "(tests.proof.batches.test_conditions)",
        "padding with a cache: its forward refuses use_cache: AssertionError: no mask with a cache "
        "(tests.proof.batches.test_conditions)",
    } <= without_line_numbers(report.uncovered)

    report = verify_sharded(Careful, TinyPlan, conditions="each")
    assert report.passed, report.table()
    assert {
        "padding: its forward refuses an attention_mask in training: AssertionError: no mask in training "
        "(tests.proof.batches.test_conditions)",
        "a forward with a cache: its forward refuses use_cache: AssertionError: no cache "
        "(tests.proof.batches.test_conditions)",
    } <= without_line_numbers(report.uncovered)


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params", "memory"])
@pytest.mark.parametrize("make", [lambda **values: SimpleNamespace(**values), dict])
def test_a_cache_is_recognised_by_one_of_three_names(name, make):
    """`cache` since transformers 5.24, before it `past_key_values`, and Mamba's `cache_params`; another name is reported."""

    class Cached(Tiny):
        def forward(self, input_ids, use_cache=False, **arguments):
            caches.append(arguments.get(name))
            return make(
                **{"logits": super().forward(input_ids).logits, name: ["state"] if use_cache else None}
            )

    parameters = [
        inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in ("input_ids", "use_cache", name)
    ]
    Cached.forward.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *parameters]
    )
    caches = []
    report = verify_sharded(Cached, TinyPlan, conditions="each")
    assert report.passed, report.table()
    unknown = "a forward with a cache: its forward takes none called cache, past_key_values or cache_params"
    assert (["state"] in caches) is (unknown not in report.uncovered) is (name != "memory")


def test_a_cache_that_needs_a_mask_is_filled_with_one():
    """A mixer like the forgetting transformer, or like PaTH attention, which accepts padding only in evaluation."""

    class Masked(Tiny):
        def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
            assert attention_mask is None or not self.training, "no mask in training"
            assert attention_mask is not None or not use_cache, "a cache goes with a mask"
            filled.append(use_cache)
            return SimpleNamespace(
                logits=super().forward(input_ids).logits, past_key_values=use_cache or None
            )

    filled = []
    model = Masked().double()
    sampler = Sampler(model, None, 1, seed=0)
    assert without_line_numbers(leave_out_what_is_refused(model, sampler)) == {
        "padding: its forward refuses an attention_mask in training: AssertionError: no mask in training "
        "(tests.proof.batches.test_conditions)",
        "a cache without padding: its forward refuses use_cache: AssertionError: a cache goes with a mask "
        "(tests.proof.batches.test_conditions)",
    }
    script = write_script(TRAINED[0], sampler, torch.device("cpu"), None)
    assert not any("attention_mask" in sample.inputs for step in script.steps for sample in step)
    assert script.evaluated
    assert not any("attention_mask" in inputs for inputs in script.evaluated)
    assert script.cached is not None
    assert (script.cached[0]["attention_mask"] == 0).any()
    assert any(filled)


@pytest.mark.parametrize(
    "raised", [KernelError("no layout"), ValueError("a value"), RuntimeError("a driver")]
)
def test_an_error_of_a_stand_in_is_not_a_refusal_by_the_model(raised):
    """If a stand-in fails under padding, the proof ends; any error that is not a refusal by the model ends the proof."""
    install = ModuleType("titanplans.kernels.of_a_test")
    exec("def attend(error):\n    raise error", vars(install))

    class Fails(Tiny):
        def forward(self, input_ids, attention_mask=None):
            if attention_mask is not None:
                install.attend(raised)
            return super().forward(input_ids)

    with pytest.raises(
        PlanError,
        match=f"does not run on cpu: {type(raised).__name__}: {raised} .*, with an attention_mask in training",
    ):
        verify_sharded(Fails, TinyPlan, conditions="each")


def test_images_that_no_batch_has_are_reported():
    class Seeing(Tiny):
        def forward(self, input_ids, pixel_values=None):
            return super().forward(input_ids)

    def uncovered(inputs, conditions):
        report = verify_sharded(Seeing, TinyPlan, inputs=inputs, conditions=conditions)
        return [message for message in report.uncovered if "pixel_values" in message]

    named = ["images: no batch has pixel_values, which verify(inputs=...) would give"]
    tokens = torch.arange(16)[None]
    assert uncovered(None, "plain") == uncovered({"input_ids": tokens}, "each") == named
    assert uncovered({"input_ids": tokens, "pixel_values": torch.zeros(1)}, "plain") == []


def test_inputs_of_the_caller_are_every_batch():
    sampler = Sampler(Tiny(), {"input_ids": None}, 1, seed=0)
    assert sampler.tokens(MicroBatch(3, 15), 1) == sampler.tokens(MicroBatch(), 0)
    assert "the inputs are fixed" in next(iter(sampler.uncovered))


def test_unknown_conditions_are_refused():
    with pytest.raises(PlanError, match="conditions = 'all': pairs, each or plain"):
        verify(Tiny, TinyPlan, conditions="all")
