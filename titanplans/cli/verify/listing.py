"""`titanplans list`: what is registered. Imports no model library."""

from titanplans.tensor_parallel.registry import registered_mixers, registered_plans


def listing() -> str:
    """Return a table of the registered plans: class, module, model types, token mixers."""
    rows = [("plan", "model types", "token mixers")]
    by_plan: dict[type, tuple[list[str], list[str]]] = {}
    for column, table in enumerate((registered_plans(), registered_mixers())):
        for name, plan in table.items():
            by_plan.setdefault(plan, ([], []))[column].append(name)
    for plan, (types, mixers) in by_plan.items():
        rows.append(
            (f"{plan.__module__}:{plan.__qualname__}", ", ".join(types) or "-", ", ".join(mixers) or "-")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
