"""The page of all architectures, made of their plans, their sizes and the variants that are proved.

PYTHONPATH=. python tests/architectures.py     # writes docs/architectures.md
"""

import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import zoo
from torch import nn

from titanplans import PlanError, check_plan, kernels, modeling, registered_plans
from titanplans.cli.listing import split_by

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
LARGEST = 64
"""The largest degree that is tried."""
HEAD = """# Architectures

Made by `tests/architectures.py` of the plans, the sizes and the proofs: what is below is what the code says.

*Lines* are those of the plan's class. *Split by* says what of a mixer each rank has a part of, and names what is not plain:
packed projections, norms over a split width, sums inside the region, a mixer's own numbers. Of what is not split every rank
has all; MLPs and vocabularies are split in each. *Largest degree* is that of each named size, among powers of two up to 64.
*Proved* are the variants of the config in `tests/zoo.py`, each at tp 2 and 4 with sequence and loss sharded and whole: loss,
gradients, weights after a step, in float64 against the whole model.

| architecture | plan | lines | mixer | split by | largest degree | proved variants |
|---|---|---|---|---|---|---|
"""


def own_plans() -> dict[str, type]:
    """Return this project's plans by model type."""
    plans = registered_plans()
    return {name: plan for name, plan in plans.items() if plan.__module__.startswith("titanplans.plans.")}


def page() -> str:
    """Return the page."""
    kernels.install("cpu")
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows())


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each architecture."""
    for name, plan in own_plans().items():
        model = modeling.build(modeling.load_config(name, "debug"))
        styles = check_plan(model, 2)
        split = split_by(model, plan, styles)
        yield (
            f"`{name}`",
            place(plan),
            str(len(inspect.getsource(plan).splitlines())),
            ", ".join(f"`{kind}`" for kind in split),
            "; ".join(dict.fromkeys(split.values())).replace("'", "`"),
            ", ".join(f"{flavor} {largest(name, flavor)}" for flavor in modeling.available()[name]),
            variants(name),
        )


def place(plan: type) -> str:
    """Return the file of a plan."""
    return f"`{plan.__module__.removeprefix('titanplans.').replace('.', '/')}.py`"


def largest(name: str, flavor: str) -> int:
    """Return the largest degree that the plan takes of a named size."""
    model = modeling.build(modeling.load_config(name, flavor))
    degree = 1
    while degree < LARGEST and fits(model, 2 * degree):
        degree *= 2
    return degree


def fits(model: nn.Module, degree: int) -> bool:
    try:
        check_plan(model, degree)
    except PlanError:
        return False
    return True


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


if __name__ == "__main__":
    PAGE.write_text(page())
