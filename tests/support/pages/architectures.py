"""The page of all architectures: what `titanplans list --long` prints, and the variants that are proved.

python docs/generate.py architectures.md     # writes it
"""

from collections.abc import Iterator
from functools import cache

from tests import zoo
from tests.support.paths import GENERATED
from titanplans import registered_plans
from titanplans.cli.listing import architectures

PAGE = GENERATED / "architectures.md"
HEAD = """# Architectures

`titanplans list --long` prints these, but for the last column.

*Lines*: those of the plan's class. *Split by*: the heads by which a mixer is split, and its packed projections, norms over a
split width, sums inside the region and own numbers. Every rank has all of the rest; MLPs and vocabularies are always split.
*Largest degree*: of each named size, among powers of two up to 64. *Proved variants*: of the config, in `tests/zoo.py`, each
at tp 2 and 4 with sequence and loss sharded and whole: loss, gradients and weights after a step, in float64 against the
whole model.

| architecture | plan | lines | mixer | split by | largest degree | proved variants |
|---|---|---|---|---|---|---|
"""


def own_plans() -> dict[str, type]:
    """Return this project's plans by model type."""
    plans = registered_plans()
    return {name: plan for name, plan in plans.items() if plan.__module__.startswith("titanplans.plans.")}


def page() -> str:
    """Return the page."""
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows())


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each architecture."""
    for one in architectures(list(own_plans())):
        yield (
            f"`{one.name}`",
            f"`{one.plan}`",
            str(one.lines),
            ", ".join(f"`{kind}`" for kind in one.split),
            "; ".join(dict.fromkeys(one.split.values())).replace("'", "`"),
            ", ".join(f"{flavor} {degree}" for flavor, degree in one.degrees.items()),
            variants(one.name),
        )


@cache
def variants(name: str) -> str:
    """Return the options that are proved: the fields of each variant that are not the sizes all of them share."""
    if name in zoo.ARCHITECTURES:
        return ", ".join(f"{k} = {v}" for k, v in zoo.ARCHITECTURES[name].options.items()) or "plain"
    made = zoo.FAMILIES[name]
    shared = {key for key in made[0] if all(one.get(key) == made[0][key] for one in made)}
    told = [", ".join(f"{k} = {v}" for k, v in one.items() if k not in shared) or "plain" for one in made]
    if len(made) == 1:
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        told = [", ".join(f"{k} = {v}" for k, v in made[0].items() if k not in sizes)]
    return "; ".join(told)
