"""`titanplans list --long`: each architecture's plan, what a rank has a part of, and the largest degree of each size."""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from titanplans import kernels, modeling
from titanplans.apply.apply import check_plan
from titanplans.cli.listing import split_by
from titanplans.errors import PlanError, VerifyError, nearest
from titanplans.plan.degrees import Degrees
from titanplans.plan.plan import TPPlan
from titanplans.plan.registry import faulty_plans, registered_plans

_DEGREES = (2, 4, 8, 16, 32, 64)
"""Those that are tried."""


class Architecture(NamedTuple):
    """A registered model type with named sizes."""

    name: str
    plan: str
    """The file of its plan's class."""
    lines: int
    """Of that class."""
    split: dict[str, str]
    """What each rank has a part of, by the class of the mixer."""
    degrees: dict[str, int]
    """The largest degree of each size, among powers of two up to 64."""


def long_listing(model_types: Sequence[str] = ()) -> str:
    """Return some lines about each architecture, or about those in `model_types`.

    Raises:
        VerifyError: one of them has no plan, or no debug flavor to build.
    """
    lines = []
    for one in architectures(model_types):
        lines.append(f"{one.name}: {one.plan}, {one.lines} lines")
        lines += [f"  {kind}: split by {words}" for kind, words in one.split.items()]
        lines.append("  largest degree: " + ", ".join(f"{size} {n}" for size, n in one.degrees.items()))
    return "\n".join([*lines, *(f"not loaded: {fault}" for fault in faulty_plans())])


def architectures(model_types: Sequence[str] = ()) -> Iterator[Architecture]:
    """Yield the registered architectures that have a debug flavor, or those in `model_types`; all are built on meta."""
    kernels.install("cpu")  # some models can't be built without; on meta they run on nothing
    plans, flavors = registered_plans(), modeling.available()
    known = [name for name in plans if "debug" in flavors.get(name, ())]
    for name in model_types or known:
        if name not in known:
            meant = nearest(name, known)
            raise VerifyError(
                f"list --long {name}: no plan with a debug flavor is registered for it"
                f"{f'; did you mean {meant}?' if meant else ''}"
            )
        model = modeling.build(modeling.load_config(name, "debug"))
        plan = plans[name]
        yield Architecture(
            name,
            place(plan),
            len(inspect.getsource(plan).splitlines()),
            split_by(model, plan, check_plan(model, Degrees(tp=2))),
            {flavor: largest(name, flavor) for flavor in flavors[name]},
        )


def place(plan: type[TPPlan]) -> str:
    """Return the file of a plan, as its module names it: plans/fla/gla.py."""
    return f"{plan.__module__.removeprefix('titanplans.').replace('.', '/')}.py"


def largest(name: str, flavor: str) -> int:
    """Return the largest degree that the plan accepts for a named size."""
    model = modeling.build(modeling.load_config(name, flavor))
    for before, degree in itertools.pairwise((1, *_DEGREES)):
        try:
            check_plan(model, Degrees(tp=degree))
        except PlanError:
            return before
    return _DEGREES[-1]
