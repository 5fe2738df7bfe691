"""One tensor under two names has one layout."""

from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.resolve import ResolvedPlan


def check_tied(plan: ResolvedPlan) -> None:
    """Refuse to lay one tensor out in two ways."""
    for names in tied_parameters(plan.model):
        layouts = {}
        for name in names:
            key, _, param_name = name.rpartition(".")
            key = name if name in plan.styles else key
            if key not in plan.styles:
                raise PlanError(
                    f"{' and '.join(names)} are one tensor, and the plan has no style for {key}: give it one; if both names "
                    "are of one module, let the model hold it once, and its forward call it again"
                )
            if key in plan.by_key:
                layouts[name] = plan.by_key[key].layouts[param_name].placement
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
