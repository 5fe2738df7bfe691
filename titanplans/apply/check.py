"""`check`: all checks of a plan against a model before anything changes. It needs no process group, and runs on meta."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.checks.code import code_of_ranks
from titanplans.plan.checks.packed import packed_faults
from titanplans.plan.checks.regions import region_faults
from titanplans.plan.checks.shared import check_tied, shared_module_faults, tied_parameters
from titanplans.plan.checks.sizes import check_degree, check_experts, check_heads
from titanplans.plan.plan import TPPlan
from titanplans.plan.resolve import ResolvedPlan, resolve
from titanplans.precision.float8.checks import check_float8
from titanplans.precision.nf4 import nf4_faults
from titanplans.split.converted import Crossing
from titanplans.split.decoder import is_present, join
from titanplans.split.guards.dropout import check_dropout
from titanplans.split.local_code import Functions


@dataclass(frozen=True)
class Checked:
    """A resolved plan that fits its model, and the facts about plan and model that `split` needs."""

    plan: ResolvedPlan
    crossings: dict[str, Crossing]
    """Which tensors cross the border of a region or of the head in float8, by plan key."""
    tied: list[list[str]]
    """The names of parameters that are the same tensor, one list per tensor."""
    attributes: dict[str, dict[str, Any]]
    """The attributes of split mixers and MLPs that count this rank's heads or width, by the module's name."""
    functions: dict[str, Functions]
    """The makers of local functions for the code of split mixers, and of the model, by the module's name."""

    def of_stage(self, absent: Collection[str]) -> "Checked":
        """Return the checked plan of a pipeline stage, without the modules `absent`, which are on other stages."""
        tied = [[name for name in names if is_present(name, absent)] for names in self.tied]
        return Checked(
            self.plan.of_stage(absent),
            {key: crossing for key, crossing in self.crossings.items() if is_present(key, absent)},
            [names for names in tied if len(names) > 1],
            {
                name: {key: value for key, value in values.items() if is_present(join(name, key), absent)}
                for name, values in self.attributes.items()
                if is_present(name, absent)
            },
            {name: functions for name, functions in self.functions.items() if is_present(name, absent)},
        )


def check(
    source: TPPlan, model: nn.Module, backend: str | None = None, dtype: torch.dtype | None = None
) -> Checked:
    """Check the plan `source` against `model`, which is not changed.

    Args:
        source: the plan, with its options.
        model: not split yet.
        backend: backend of the TP group; None if there is no group yet.
        dtype: dtype of the weights in products. None: the parameters' dtype.

    Raises:
        PlanError: see `apply.check_plan`.
    """
    plan = resolve(source, model)
    faults = chain(shared_module_faults(plan), region_faults(plan), nf4_faults(plan), packed_faults(plan))
    for key, reason in faults:
        raise PlanError(reason, key=key, style=plan.styles[key], module=plan.module_at(key))
    check_tied(plan)
    check_experts(plan)
    check_dropout(model, source.options.degrees.tp_cp)
    check_degree(plan, dtype)
    crossings = check_float8(plan, backend)
    if source.options.degrees.cp > 1:
        check_heads(plan)
    attributes, functions = code_of_ranks(plan)
    return Checked(plan, crossings, tied_parameters(model), attributes, functions)
