"""`titanplans list`: the registered plans; of model types, what each rank has a part of and the largest degrees."""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.apply.apply import check_plan
from titanplans.cli.verify.arguments import not_listed
from titanplans.errors import PlanError
from titanplans.plan.degrees import Degrees
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import TPPlan
from titanplans.plan.registry import faulty_plans, registered_mixers, registered_plans
from titanplans.split.decoder import find_decoder
from titanplans.styles.base import native_styles
from titanplans.text import columns, fitted

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


def listing() -> str:
    """Return a table of the registered plans: class, module, model types, token mixers, and the unit of their split."""
    by_plan: dict[type[TPPlan], tuple[list[str], list[str]]] = {}
    for column, table in enumerate((registered_plans(), registered_mixers())):
        for name, plan in table.items():
            by_plan.setdefault(plan, ([], []))[column].append(name)
    rows = [("plan", "model types", "token mixers", "split by")]
    for plan, (types, mixers) in by_plan.items():
        by = "heads" if plan.head_names == TPPlan.head_names else ", ".join(plan.head_names)
        place = f"{plan.__module__}:{plan.__qualname__}"
        rows.append((place, ", ".join(types) or "-", ", ".join(mixers) or "-", by or "nothing"))
    return "\n".join(
        [*columns(rows), *map(fitted, _not_loaded()), "titanplans list MODEL_TYPE ...: each rank's part"]
    )


def long_listing(model_types: Sequence[str]) -> str:
    """Return some lines about each architecture, or about those in `model_types`.

    Raises:
        VerifyError: one of them has no plan, or no debug flavor to build.
    """
    lines = []
    for one in architectures(model_types):
        lines.append(f"{one.name}: {one.plan}, {one.lines} lines")
        lines += [f"  {kind}: split by {words}" for kind, words in one.split.items()]
        lines.append("  largest degree: " + ", ".join(f"{size} {n}" for size, n in one.degrees.items()))
    return "\n".join(map(fitted, [*lines, *_not_loaded()]))


def architectures(model_types: Sequence[str]) -> Iterator[Architecture]:
    """Yield the registered architectures that have a debug flavor, or those in `model_types`; all are built on meta."""
    from titanplans import kernels, modeling  # which import all model libraries

    kernels.install("cpu")  # some models can't be built without; on meta they run on nothing
    plans, flavors = registered_plans(), modeling.available()
    known = [name for name in plans if "debug" in flavors.get(name, ())]
    for name in model_types or known:
        if name not in known:
            raise not_listed(name, known)
        model, plan = modeling.build(modeling.load_config(name, "debug")), plans[name]
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
    from titanplans import modeling

    model = modeling.build(modeling.load_config(name, flavor))
    for before, degree in itertools.pairwise((1, *_DEGREES)):
        try:
            check_plan(model, Degrees(tp=degree))
        except PlanError:
            return before
    return _DEGREES[-1]


def _not_loaded() -> list[str]:
    return [f"not loaded: {fault}" for fault in faulty_plans()]


def split_by(model: nn.Module, plan: type[TPPlan], styles: Mapping[str, ParallelStyle]) -> dict[str, str]:
    """Return in words, for each class of mixer in a whole `model`, what ranks share out by these styles of `plan`."""
    found = {}
    for key, mixer in find_decoder(model).mixers.items():
        kind = type(mixer).__name__
        if kind in found:
            continue
        every = native_styles(styles)
        own = {k.removeprefix(f"{key}."): style for k, style in every.items() if k.startswith(f"{key}.")}
        if not any(style.splits_weights for style in own.values()):
            unsplit = key in every and every[key].runs_unsplit
            found[kind] = "nothing: whole on every rank" if unsplit else "nothing"
            continue
        words = [_quoted(plan(TPOptions(Degrees(tp=2))).plan_of(mixer).heads(mixer))]
        parts: dict[str, list[str]] = {}
        for k, style in own.items():
            if style.listed_as:
                parts.setdefault(style.listed_as, []).append(k)
        parts["numbers of its own"] = [
            k for k, s in own.items() if s.splits_weights and k in mixer._parameters
        ]
        words += [f"{what}: {_quoted(keys)}" for what, keys in parts.items() if keys]
        found[kind] = "; ".join(words)
    return found


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
