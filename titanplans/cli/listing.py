"""`titanplans list`: print the registered plans; for model types, print what is split, and the largest degrees."""

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
from titanplans.plan.registry import faulty_plans, file_of, registered_mixers, registered_plans
from titanplans.split.decoder import find_decoder
from titanplans.styles.base import native_styles
from titanplans.text import columns, fitted

_DEGREES = (2, 4, 8, 16, 32, 64)
"""The tensor-parallel degrees that are tried."""


class Architecture(NamedTuple):
    """A registered model type with named sizes."""

    name: str
    plan: str
    """The file of the plan's class."""
    lines: int
    """The number of lines of the plan's class."""
    split: dict[str, str]
    """A description of what is split over the ranks, by the class of the mixer."""
    degrees: dict[str, int]
    """The largest tensor-parallel degree of each size, among powers of two up to 64."""


def listing() -> str:
    """Return a table of the registered plans: class, token mixers, the split unit (heads, for most plans), and model
    types."""
    by_plan: dict[type[TPPlan], tuple[list[str], list[str]]] = {}
    for column, table in enumerate((registered_plans(), registered_mixers())):
        for name, plan in table.items():
            by_plan.setdefault(plan, ([], []))[column].append(name)
    rows = [("plan", "token mixers", "split by", "model types")]
    for plan, (types, mixers) in by_plan.items():
        by = "heads" if plan.head_names == TPPlan.head_names else ", ".join(plan.head_names)
        name = f"{plan.__module__}:{plan.__qualname__}"
        rows.append((name, ", ".join(mixers) or "-", by or "nothing", ", ".join(types) or "-"))
    return "\n".join(
        [*columns(rows), *map(fitted, _not_loaded()), "titanplans list MODEL_TYPE ...: what each rank holds"]
    )


def long_listing(model_types: Sequence[str]) -> str:
    """Return a few lines about each registered architecture, or each of `model_types`.

    Raises:
        VerifyError: a model type has no plan, or no debug flavor to build.
    """
    lines = []
    for one in architectures(model_types):
        lines.append(f"{one.name}: {one.plan}, {one.lines} lines")
        lines += [f"  {kind}: split by {words}" for kind, words in one.split.items()]
        lines.append("  largest degree: " + ", ".join(f"{size} {n}" for size, n in one.degrees.items()))
    return "\n".join(map(fitted, [*lines, *_not_loaded()]))


def architectures(model_types: Sequence[str]) -> Iterator[Architecture]:
    """Yield the registered architectures with a debug flavor, or those in `model_types`. Models are built on meta."""
    from titanplans import kernels, modeling  # imported here: they import all model libraries

    kernels.install("cpu")  # without them some models can't be built on a machine without a GPU
    plans, flavors = registered_plans(), modeling.available()
    listed = [name for name in plans if "debug" in flavors.get(name, ())]
    for name in model_types or listed:
        if name not in listed:
            raise not_listed(name, listed)
        model, plan = modeling.build(modeling.load_config(name, "debug")), plans[name]
        yield Architecture(
            name,
            file_of(plan),
            len(inspect.getsource(plan).splitlines()),
            split_by(model, plan, check_plan(model, Degrees(tp=2))),
            {flavor: largest(name, flavor) for flavor in flavors[name]},
        )


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
    """Describe what the `styles` of `plan` split over the ranks, for each class of mixer in the unsplit `model`."""
    descriptions = {}
    all_styles = native_styles(styles)
    for key, mixer in find_decoder(model).mixers.items():
        kind = type(mixer).__name__
        if kind in descriptions:
            continue
        mixer_styles = {
            k.removeprefix(f"{key}."): style for k, style in all_styles.items() if k.startswith(f"{key}.")
        }
        if not any(style.splits_weights for style in mixer_styles.values()):
            is_unsplit = key in all_styles and all_styles[key].runs_unsplit
            descriptions[kind] = "nothing: replicated on every rank" if is_unsplit else "nothing"
            continue
        words = [_quoted(plan(TPOptions(Degrees(tp=2))).plan_of(mixer).heads(mixer))]
        keys_by_title: dict[str, list[str]] = {}
        for k, style in mixer_styles.items():
            if style.listed_as:
                keys_by_title.setdefault(style.listed_as, []).append(k)
        keys_by_title["parameters of the mixer itself"] = [
            k for k, s in mixer_styles.items() if s.splits_weights and k in mixer._parameters
        ]
        words += [f"{title}: {_quoted(keys)}" for title, keys in keys_by_title.items() if keys]
        descriptions[kind] = "; ".join(words)
    return descriptions


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
