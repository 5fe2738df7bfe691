"""The proof: a plan's split model is compared with the whole one, quantity by quantity, in units of rounding.

    from titanplans.proof import verify

    report = verify(lambda: MyModel(config), MyPlan)
    print(report.table())

`verify` documents the quantities, `titanplans.proof.compare.tolerance` the unit and the tolerance. No model library is
imported.

`verify` chooses the cases (`Proof.cases`), and proves them group by group (`Proof.run`): `ReferenceRun` trains the unsplit
model, `prove_case` the split one on each rank, `Comparison` compares; `Blame` explains a case that fails.

    verify.py   every case of a plan and a model      batches/   conditions, trainings, samples
    cases.py    the cases of one reference            ranks/     threads of this process, or a process group
    case.py     one split training                    compare/   both trainings, units, tolerances
    report.py   the verdict                           explain/   conditions and places of a failure
"""

from titanplans.proof.report import Report
from titanplans.proof.result import CaseResult, Check, Finding, Location, Refusal
from titanplans.proof.verify import verify

__all__ = ["CaseResult", "Check", "Finding", "Location", "Refusal", "Report", "verify"]
