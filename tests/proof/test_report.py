"""The report of a proof as a table, and its verdict."""

from titanplans import Degrees, TPOptions
from titanplans.proof.batches.conditions import PLAIN
from titanplans.proof.report import Report
from titanplans.proof.result import CaseResult, Check, Finding, Location, Refusal


def test_the_report_is_a_table():
    def case(degree, error, finding=None):
        checks = (Check("loss", 0.5, 700.0), Check("gradients", error, 700.0, "norm"))
        return CaseResult(TPOptions(Degrees(tp=degree), True, False), PLAIN, checks, finding=finding)

    finding = Finding(
        "backward",
        Location("layers.0.norm.weight", 2e15),
        (Location("layers.0.proj.weight", 1.25, "summed over the ranks"),),
        "exactly 2 times too large: once for each rank",
    )
    four, eight = Degrees(tp=4), Degrees(tp=8)
    report = Report(
        "Model, Plan", "float64", (case(2, 3.0), case(4, 2e15, finding)),
        (Refusal((TPOptions(eight), TPOptions(eight, False, False)), "num_heads = 4"), Refusal((TPOptions(four),), "odd")),
        (PLAIN,), ("padding: no attention_mask",),
    )  # fmt: skip
    assert not report.passed
    assert report.table() == "\n".join([
        "Model, Plan, float64, ranks: threads",
        "",
        "tp  loss     sequence    training  loss  logits  gradients  replicas  norm  AdamW  verdict  worst",
        " 2  sharded  replicated  A          0.5       -        3.0         -     -      -  right    gradients norm",
        " 4  sharded  replicated  A          0.5       -    2.0e+15         -     -      -  WRONG    gradients norm",
        "",
        "wrong: tp 4, loss sharded, sequence replicated",
        "  backward: first wrong at layers.0.norm.weight: 2.0e+15 epsilons, exactly 2 times too large: once for each rank; "
        "correct nearby: layers.0.proj.weight (summed over the ranks) 1.2",
        "",
        "not proved: tp 8: num_heads = 4",
        "not proved: tp 4, loss sharded, sequence sharded: odd",
        "not covered: padding: no attention_mask",
        "1 of 2 cases WRONG. Differences in epsilons (one float64 rounding of every weight); sums in "
        "another order may differ by 700.0.",
    ])  # fmt: skip


def test_a_report_without_cases_has_not_passed():
    assert not Report("Model, Plan", "float64", ()).passed
