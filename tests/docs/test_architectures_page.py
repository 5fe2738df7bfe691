"""docs/generated/architectures.md lists every plan with its number of lines and its proved variants.

test_generated.py compares the full page.
"""

import inspect

from tests.support.pages import architectures
from titanplans.plan.registry import file_of


def test_the_page_has_every_architecture():
    lines = [
        line.split(" | ") for line in architectures.PAGE.read_text().splitlines() if line.startswith("| `")
    ]
    listed = {cells[0].strip("| `"): (cells[1], cells[2], cells[6].removesuffix(" |")) for cells in lines}
    assert listed == {
        name: (
            f"`{file_of(plan)}`",
            str(len(inspect.getsource(plan).splitlines())),
            architectures.variants(name),
        )
        for name, plan in architectures.shipped_plans().items()
    }
