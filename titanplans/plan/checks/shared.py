"""Check that the keys of a module or tensor that has several names agree."""

from collections.abc import Iterator

from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.resolve import Entry, ResolvedPlan
from titanplans.text import class_name


def shared_module_faults(plan: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Yield each key that gives a shared module a different style than an earlier key, and the reason."""
    first: dict[tuple[int, str | None], Entry] = {}
    for entry in plan.entries:
        other = first.setdefault((id(entry.module), entry.parameter), entry)
        if repr(other.style) != repr(entry.style):
            yield (
                entry.key,
                f"it is also '{other.key}', which has {class_name(other.style)}, but a module has one style: give both "
                "keys the same",
            )


def check_tied(plan: ResolvedPlan) -> None:
    """Refuse two placements of one tensor.

    The placements of its gradients, and the rows that a rank uses, may differ: each module has its own layout of the
    tensor.

    Raises:
        PlanError: names the parameters that are one tensor, and the placement of each.
    """
    for names in tied_parameters(plan.model):
        layouts = {}
        for name in names:
            key = name if name in plan.styles else name.rpartition(".")[0]
            if key not in plan.styles:
                raise PlanError(
                    f"{' and '.join(names)} are one tensor, but the plan has no style for {key}: give it one; if both "
                    "names are of one module, register it once in the model, and call it again in the forward"
                )
            if key in plan.by_key:
                layouts[name] = plan.by_key[key].layouts[name.rpartition(".")[2]].placement
        if len(set(layouts.values())) > 1:
            raise PlanError(
                f"{' and '.join(f'{name} ({placement!r})' for name, placement in layouts.items())} are tied, so they are "
                "one tensor: give both keys styles of the same placement, or untie them in the model's config"
            )


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are the same tensor, one list per tensor."""
    groups: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(param), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
