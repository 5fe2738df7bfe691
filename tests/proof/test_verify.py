"""`verify` on correct plans: what it compares, which cases it makes, what it refuses."""

import json
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from tests import zoo
from tests.support import process_groups
from tests.support.plain_proofs import verify_plain as plain
from tests.support.plain_proofs import verify_sharded
from tests.support.refusals import refusal
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import Degrees, PlanError, TPOptions
from titanplans.proof import verify
from titanplans.proof.ranks.fake import fake_ranks


def one_case(model_fn=Tiny, plan=TinyPlan, **arguments):
    return verify_sharded(model_fn, plan, **arguments)


def test_the_grid_of_degrees_and_options_is_proved():
    """tp = 8 does not divide four heads: the report has the message of the plan's checks, and no failure."""
    lines = []
    # The same biases each time, whatever random numbers other tests drew before.
    report = verify(lambda: zoo.build("tiny"), TinyPlan, progress=lines.append)
    assert report.passed
    assert [case.options for case in report.cases if case.scenario.dtype == "float64"][:8] == [
        TPOptions(Degrees(tp=d), loss, sequence)
        for d in (2, 4)
        for loss in (True, False)
        for sequence in (True, False)
    ]
    assert {case.scenario.dtype for case in report.cases} == {"float64", "float32", "bfloat16"}
    for case in report.cases:
        compared = [check.what for check in case.checks]
        if case.scenario.dtype == "bfloat16":
            assert compared == ["loss", "replicas", "norm"]
        else:
            assert compared == ["loss", "logits", "gradients", "replicas", "norm", "AdamW"]
        assert not case.missing
        assert case.finding is None
        assert not case.notes
        # Errors of a correct plan are about one epsilon, because the tolerance (688 here) is a bound for the worst case.
        fraction = 0.01 if case.scenario.dtype == "float64" else 0.7
        assert all(check.error < fraction * check.tolerance for check in case.checks if check.tolerance)
        assert next(check for check in case.checks if check.what == "replicas").error == 0
    (refusal,) = report.refused
    assert str(refusal).startswith("not proved: tp 8: ")
    assert "num_heads = 4" in refusal.reason
    assert lines[0] == "the unsplit model"
    # one call before each case that is proved again
    again = lines.count("more perturbed runs of the unsplit model")
    assert len(lines) == lines.count("the unsplit model") + len(report.cases) + 2 * again
    assert report.subject == "Tiny, TinyPlan"


def test_sequence_dimension_first_and_shards_of_unequal_length():
    class SequenceFirst(Tiny):
        def forward(self, input_ids):
            return super().forward(input_ids.T).logits.transpose(0, 1)  # a bare tensor is an output too

    assert one_case(seq_len=13, degrees=[4]).passed
    assert plain(SequenceFirst, TinyPlan, degrees=[2], sequence_parallel=False, sequence_dim=0).passed


def test_styles_of_torch_are_proved():
    class Native(TinyPlan):
        def mlp_plan(self, mlp):
            stream = self.options.stream.placement
            prepare_input = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
            down = RowwiseParallel(output_layouts=stream)
            return {
                "": prepare_input,
                "gate_proj": ColwiseParallel(),
                "up_proj": ColwiseParallel(),
                "down_proj": down,
            }

    assert one_case(plan=Native).passed


def test_inputs_of_the_caller_are_used():
    tokens = torch.tensor([[1, 2, 3, 4]])
    batches = []

    class Watched(Tiny):
        def forward(self, input_ids):
            batches.append(input_ids.tolist())
            return super().forward(input_ids)

    assert one_case(Watched, inputs={"input_ids": tokens}).passed
    assert all(ids == tokens.tolist() for ids in batches)


def test_a_gradient_that_is_only_rounding_passes():
    """Without rotary positions softmax cancels a key bias: its gradient is noise, about 1e-17 here."""

    def build():
        model = Tiny()
        for layer in model.layers:
            layer.attn.k_proj = nn.Linear(16, 16)
        return model

    for seed in range(2):
        assert one_case(build, seed=seed).passed


def test_parameters_without_gradient_pass():
    """A frozen and an unused parameter: no gradient in the unsplit model, and none in the split one."""

    def build():
        model = Tiny()
        model.layers[0].attn_norm.weight.requires_grad_(False)
        model.layers[1].attn.q_norm.forward = lambda x: x
        return model

    assert one_case(build).passed


def test_initial_weights_of_the_model_do_not_matter():
    """With weights of zeros no error would propagate, so `verify` draws its own; it calls model_fn once."""
    calls = []

    def build():
        calls.append(1)
        model = Tiny()
        for param in model.parameters():
            nn.init.zeros_(param)
        return model

    report = one_case(build)
    assert report.passed
    assert len(calls) == 1


def refused(match, model_fn=Tiny, plan=TinyPlan, **arguments):
    assert re.search(match, refusal(verify, model_fn, plan, **arguments, kind=PlanError))


def test_wrong_arguments_are_refused():
    refused("it proves nothing by itself", dtype=torch.bfloat16)
    refused("num_heads = 4", degrees=[8])
    refused("degrees = \\[\\]", degrees=[])
    refused("2 or more", degrees=[1, 2])
    refused("processes = 0", processes=0)
    refused("on meta", lambda: Tiny().to("meta"))
    refused("no plan is registered for Tiny", plan=None)
    refused("no process group", ranks="process_group")


def test_a_model_that_does_not_run_is_refused():
    class Needs(Tiny):
        def forward(self, input_ids):
            raise RuntimeError("0 active drivers\nmore")

    place = r"\(tests\.proof.test_verify:\d+, in its first forward\)"
    refused(
        f"unsplit, does not run on cpu: RuntimeError: 0 active drivers {place}; .*--device cuda",
        Needs,
    )


def test_a_model_that_is_not_deterministic_is_refused():
    class Random(Tiny):
        def forward(self, input_ids):
            output = super().forward(input_ids)
            output.logits = nn.functional.dropout(output.logits, 0.1)
            return output

    refused("dropout", Random)


def test_threads_are_refused_in_a_process_that_is_a_rank():
    with process_groups.fake_group(2):
        refused("rank 0 of 2 already", degrees=[2])
        refused("proves degree 2 only", degrees=[4], ranks="process_group")
    with fake_ranks(2) as mesh:
        assert mesh.size() == 2
    assert not dist.is_initialized()


def test_the_report_as_json_and_as_a_table():
    report = one_case(lambda: Tiny(tied=True))
    assert report.cases[0].checks[-1].what == "tied"
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["passed"] is True
    assert data["cases"][0]["checks"][2]["what"] == "gradients"
    assert data["cases"][0]["checks"][2]["passed"] is True
    text = report.table()
    assert "all 1 cases right" in text
    assert max(map(len, text.splitlines())) <= 160
