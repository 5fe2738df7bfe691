"""`verify` over a process group of two gloo ranks: the same verdicts as with threads."""

import torch

from tests.support import process_groups
from tests.support.faulty_styles import Unsummed, tiny_plan_with
from tests.support.plain_proofs import verify_plain
from tests.support.refusals import refusal_or_none
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans.split.objects import gather_objects


def prove(rank):
    torch.manual_seed(rank)  # model_fn draws other weights on each rank; the proof has to broadcast them
    right = verify_plain(Tiny, TinyPlan, ranks="process_group", seq_len=13)
    wrong = verify_plain(
        Tiny,
        tiny_plan_with(q_norm=lambda p: Unsummed()),
        ranks="process_group",
        loss_parallel=True,
        sequence_parallel=True,
    )
    breaking = verify_plain(
        Tiny,
        tiny_plan_with(q_proj=lambda p: p.rowwise(), o_proj=lambda p: p.colwise()),
        ranks="process_group",
    )
    reports = [report.to_dict() for report in (right, wrong, breaking)]
    for report in reports:
        for case in report["cases"]:
            case.pop("seconds")
    refused = refusal_or_none(verify_plain, Tiny, TinyPlan, ranks="process_group", degrees=[4])
    return gather_objects(reports), refused, wrong.table()


def test_verdicts_over_two_processes():
    (first, second), refusal, table = process_groups.run(prove, 2)
    assert first == second, "every rank has the same report"
    right, wrong, breaking = first
    assert right["passed"]
    assert [case["tp"] for case in right["cases"]] == [2] * 4
    assert not wrong["passed"]
    finding = wrong["cases"][0]["finding"]
    assert finding["first"]["name"] == "layers.1.attn.q_norm.weight"
    assert "not summed over the ranks" in finding["reason"]
    assert "first wrong at layers.1.attn.q_norm.weight" in table
    assert breaking["cases"][0]["checks"][0]["where"] == "in layers.0.attn.q_proj"
    assert "has 2 ranks and proves degree 2 only" in refusal
