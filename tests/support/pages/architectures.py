"""docs/generated/architectures.md: what `titanplans list --long` prints, and the variants that are proved.

python docs/generate.py architectures.md     # writes the page
"""

from collections.abc import Iterator
from functools import cache

from tests import zoo
from tests.support.paths import GENERATED
from titanplans import registered_plans
from titanplans.cli.listing import architectures

PAGE = GENERATED / "architectures.md"
HEAD = """# Architectures

`titanplans list --long` prints these, without the last column.

*Lines* is the number of lines of the plan's class. *Split by* lists the attributes that count the heads of a mixer, its
packed projections, its norms over a split width, and the modules whose outputs are gathered or summed in it. MLPs and
vocabularies are always split; all other modules are replicated. *Largest degree* is the largest tensor-parallel degree of
each named size, among powers of two up to 64. *Proved variants* are variants of the config in `tests/zoo.py`. Each is
proved at tp 2 and 4, with and without sequence and loss parallelism: after a step, loss, gradients and weights equal the
unsplit model's, in float64.

| architecture | plan | lines | mixer | split by | largest degree | proved variants |
|---|---|---|---|---|---|---|
"""


def shipped_plans() -> dict[str, type]:
    """Return the plans of titanplans by model type, without the plans of other packages."""
    plans = registered_plans()
    return {name: plan for name, plan in plans.items() if plan.__module__.startswith("titanplans.plans.")}


def page() -> str:
    """Return the text of the page."""
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows())


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the table's row of each architecture."""
    for listed in architectures(list(shipped_plans())):
        yield (
            f"`{listed.name}`",
            f"`{listed.plan}`",
            str(listed.lines),
            ", ".join(f"`{kind}`" for kind in listed.split),
            "; ".join(dict.fromkeys(listed.split.values())).replace("'", "`"),
            ", ".join(f"{flavor} {degree}" for flavor, degree in listed.degrees.items()),
            variants(listed.name),
        )


@cache
def variants(name: str) -> str:
    """Return the variants of an architecture that are proved, each with the config fields that differ between variants."""
    if name in zoo.ARCHITECTURES:
        return ", ".join(f"{k} = {v}" for k, v in zoo.ARCHITECTURES[name].options.items()) or "plain"
    all_fields = zoo.FAMILIES.get(name) or (zoo.FURTHER[name],)
    first = all_fields[0]
    common = {key for key in first if all(fields.get(key) == first[key] for fields in all_fields)}
    texts = [
        ", ".join(f"{k} = {v}" for k, v in fields.items() if k not in common) or "plain"
        for fields in all_fields
    ]
    if len(all_fields) == 1:
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        texts = [", ".join(f"{k} = {v}" for k, v in first.items() if k not in sizes)]
    return "; ".join(texts)
