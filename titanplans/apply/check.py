"""`check`: what strict application refuses before anything moves, the plan against the model.

A plan is resolved once, and every check reads the same entries: those of the plan alone (`titanplans.plan.checks`), of
float8, of NF4 and of dropouts. None needs a process group, and each holds on meta.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.checks.packed import packed_faults
from titanplans.plan.checks.regions import (
    Fault,
    end_faults,
    mixer_faults,
    module_faults,
    parameter_faults,
    region_faults,
)
from titanplans.plan.checks.sizes import check_degree
from titanplans.plan.checks.tied import check_tied, tied_parameters
from titanplans.plan.converted import Crossing
from titanplans.plan.local_code import Functions, code_of_ranks
from titanplans.plan.plan import TPPlan
from titanplans.plan.resolve import ResolvedPlan, resolve
from titanplans.precision.float8.checks import check_float8, check_torchao_styles, float8_crossings
from titanplans.precision.nf4 import nf4_faults
from titanplans.split.guards.dropout import check_dropout


@dataclass(frozen=True)
class Checked:
    """A plan that fits its model, and all that its application needs to know of both."""

    plan: ResolvedPlan
    crossings: dict[str, Crossing]
    """How a sequence crosses the border of a region or of the head in float8, by plan key."""
    tied: list[list[str]]
    """The names of parameters that are one tensor, group by group."""
    attributes: dict[str, dict[str, Any]]
    """What the code of a split mixer or MLP counts on each rank, by the module's name."""
    functions: dict[str, Functions]
    """Which functions the code of a split mixer, and of the model, calls, by the module's name."""


def check(
    source: TPPlan, model: nn.Module, backend: str | None = None, dtype: torch.dtype | None = None
) -> Checked:
    """Check the plan `source` against `model`, which is left as it is.

    Args:
        source: the plan, with its options.
        model: not yet split.
        backend: that of the TP group; None if there is no group yet.
        dtype: of the weights in products; None: their own.

    Raises:
        PlanError: see `apply.check_plan`.
    """
    plan = resolve(source, model)
    for faults in (
        parameter_faults,
        region_faults,
        mixer_faults,
        end_faults,
        module_faults,
        nf4_faults,
        packed_faults,
    ):
        _refuse(faults(plan), plan)
    check_tied(plan)
    check_dropout(model, plan.degree)
    check_degree(plan, dtype)
    check_float8(plan)
    check_torchao_styles(plan, backend)
    attributes, functions = code_of_ranks(plan)
    return Checked(plan, float8_crossings(plan), tied_parameters(model), attributes, functions)


def _refuse(faults: Iterable[Fault], plan: ResolvedPlan) -> None:
    """Raise a PlanError of the first of `faults`, if there is one."""
    for key, reason in faults:
        raise PlanError(reason, key=key, style=plan.styles[key], module=plan.module_at(key))
