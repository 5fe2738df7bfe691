"""`titanplans list`: the registered plans; for named model types also each rank's part of a mixer."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.apply.apply import check_plan
from titanplans.cli.verify.arguments import not_listed
from titanplans.plan.decoder import find_decoder
from titanplans.plan.degrees import Degrees
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import TPPlan
from titanplans.plan.registry import faulty_plans, registered_mixers, registered_plans
from titanplans.plan.styles.base import own_styles
from titanplans.plan.styles.norms import GatheredInRegion, SplitNorm
from titanplans.plan.styles.projections import KVColwise, Packed, RowwiseInRegion
from titanplans.plan.styles.replicated import Whole
from titanplans.text import columns

_WORDS: Mapping[str, tuple[type, ...]] = {
    "ranks may share heads of": (KVColwise,),
    "packed": (Packed,),
    "norm over the width": (SplitNorm,),
    "gathered": (GatheredInRegion,),
    "summed inside": (RowwiseInRegion,),
}
"""The words for a mixer's parts with such a style."""


def listing(model_types: Sequence[str] = ()) -> str:
    """Return a table of the registered plans: class, module, model types, token mixers, and the unit of their split.

    Args:
        model_types: only their plans, and each rank's part of their mixers.

    Raises:
        VerifyError: a model type has no plan.
    """
    by_plan: dict[type[TPPlan], tuple[list[str], list[str]]] = {}
    for column, table in enumerate((registered_plans(), registered_mixers())):
        for name, plan in table.items():
            by_plan.setdefault(plan, ([], []))[column].append(name)
    rows = [("plan", "model types", "token mixers", "split by")]
    for plan, (types, mixers) in by_plan.items():
        if not model_types or not set(types).isdisjoint(model_types):
            place = f"{plan.__module__}:{plan.__qualname__}"
            by = "heads" if plan.head_names == TPPlan.head_names else ", ".join(plan.head_names)
            rows.append((place, ", ".join(types) or "-", ", ".join(mixers) or "-", by or "nothing"))
    said = [line for name in model_types for line in _of_debug_flavor(name)]
    more = [] if model_types else ["titanplans list MODEL_TYPE ...: each rank's part"]
    return "\n".join([*columns(rows), *said, *(f"not loaded: {fault}" for fault in faulty_plans()), *more])


def _of_debug_flavor(name: str) -> list[str]:
    """Return each rank's part of the debug flavor of a model type, built on meta: one line for each class of mixer."""
    from titanplans import (
        kernels,
        modeling,  # imports all model libraries
    )

    plans = registered_plans()
    if name not in plans:
        raise not_listed(name, plans)
    if "debug" not in modeling.available().get(name, ()):
        return [f"{name}: its split is not listed: there is no debug flavor of it to build"]
    kernels.install("cpu")  # some models can't be built without
    model = modeling.build(modeling.load_config(name, "debug"))
    found = split_by(model, plans[name], check_plan(model, Degrees(tp=2)))
    return [
        f"{name}{f', {kind}' if len(found) > 1 else ''}: each rank has its part of {words}"
        for kind, words in found.items()
    ]


def split_by(model: nn.Module, plan: type[TPPlan], styles: Mapping[str, ParallelStyle]) -> dict[str, str]:
    """Return in words, for each class of mixer in `model`, the parts that the ranks share out.

    Args:
        model: not split.
        plan: its plan.
        styles: of that plan, at some degree.
    """
    found = {}
    for key, mixer in find_decoder(model).mixers.items():
        kind = type(mixer).__name__
        if kind in found:
            continue
        own = {k.removeprefix(f"{key}."): s for k, s in own_styles(styles).items() if k.startswith(f"{key}.")}
        if not any(style.splits for style in own.values()):
            found[kind] = "nothing: whole on every rank" if isinstance(styles.get(key), Whole) else "nothing"
            continue
        words = [_quoted(plan(TPOptions(Degrees(tp=2))).plan_of(mixer).heads(mixer))]
        parts = {what: [k for k, s in own.items() if isinstance(s, kinds)] for what, kinds in _WORDS.items()}
        parts["numbers of its own"] = [k for k, s in own.items() if s.splits and k in mixer._parameters]
        words += [f"{what}: {_quoted(keys)}" for what, keys in parts.items() if keys]
        found[kind] = "; ".join(words)
    return found


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
