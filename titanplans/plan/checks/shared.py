"""A module or a tensor that a model has under several names: its keys have to agree."""

from collections.abc import Iterator

from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.resolve import Entry, ResolvedPlan
from titanplans.text import class_name


def shared_module_faults(plan: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Yield each key that gives a module, which blocks share, another style than an earlier key."""
    first: dict[tuple[int, str | None], Entry] = {}
    for entry in plan.entries:
        other = first.setdefault((id(entry.module), entry.parameter), entry)
        if repr(other.style) != repr(entry.style):
            yield (
                entry.key,
                f"it is also '{other.key}', which has {class_name(other.style)}, and a module has one style: give both keys "
                "the same",
            )


def check_tied(plan: ResolvedPlan) -> None:
    """Refuse two placements of one tensor.

    Its gradients and the rows that a rank takes may differ: each module has a view of it, with a layout of its own.

    Raises:
        PlanError: names the parameters that are one tensor, and what the plan has for each.
    """
    for names in tied_parameters(plan.model):
        layouts = {}
        for name in names:
            key = name if name in plan.styles else name.rpartition(".")[0]
            if key not in plan.styles:
                raise PlanError(
                    f"{' and '.join(names)} are one tensor, and the plan has no style for {key}: give it one; if both names "
                    "are of one module, let the model hold it once, and its forward call it again"
                )
            if key in plan.by_key:
                layouts[name] = plan.by_key[key].layouts[name.rpartition(".")[2]].placement
        if len(set(layouts.values())) > 1:
            raise PlanError(
                f"{' and '.join(f'{name} ({placement!r})' for name, placement in layouts.items())} are tied, so one "
                "tensor: give both keys styles of the same placement, or untie them in the model's config"
            )


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one tensor, group by group."""
    groups: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(param), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
