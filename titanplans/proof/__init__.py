"""The proof: a model that is split by a plan is compared with the unsplit model, quantity by quantity, in rounding units.

    from titanplans.proof import verify

    report = verify(lambda: MyModel(config), MyPlan)
    print(report.table())

`verify` documents the quantities, and `titanplans.proof.compare.tolerance` the rounding unit and the tolerance. `verify`
chooses the cases (`Proof.cases`), and proves them in groups that share a reference (`Proof.run`): `ReferenceRun` trains
the unsplit model, `prove_case` trains the split model on each rank, `Comparison` compares them, and `Blame` explains a
case that fails.

    verify.py   every case of a plan and a model      batches/   conditions, trainings, samples
    cases.py    the choice and the proof of cases     ranks/     threads of this process, or a process group
    case.py     one split training                    compare/   both trainings, units, tolerances
    report.py   the verdict                           explain/   what a failing case needs, and its first wrong tensor
"""

from titanplans.proof.report import Report
from titanplans.proof.result import CaseResult, Check, Finding, Location, Refusal
from titanplans.proof.verify import verify

__all__ = ["CaseResult", "Check", "Finding", "Location", "Refusal", "Report", "verify"]
