"""The proof: a plan's split model against the whole one, quantity by quantity, in units of rounding.

    from titanplans.proof import verify

    report = verify(lambda: MyModel(config), MyPlan)
    print(report.table())

No model library is imported. `verify` documents what is compared, `titanplans.proof.tolerance` the unit and the tolerance.
"""

from titanplans.proof.grid import verify
from titanplans.proof.report import CaseResult, Check, Finding, Place, Refusal, Report

__all__ = ["CaseResult", "Check", "Finding", "Place", "Refusal", "Report", "verify"]
