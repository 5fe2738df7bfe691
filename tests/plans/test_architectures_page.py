"""docs/architectures.md says what the plans say; `PYTHONPATH=. python tests/architectures.py` writes it."""

import inspect

import architectures
import pytest


def test_the_page_has_every_architecture():
    lines = [
        line.split(" | ") for line in architectures.PAGE.read_text().splitlines() if line.startswith("| `")
    ]
    found = {cells[0].strip("| `"): (cells[1], cells[2], cells[6].removesuffix(" |")) for cells in lines}
    assert found == {
        name: (
            architectures.place(plan),
            str(len(inspect.getsource(plan).splitlines())),
            architectures.variants(name),
        )
        for name, plan in architectures.own_plans().items()
    }


@pytest.mark.exhaustive
def test_the_page_is_what_the_code_says():
    assert architectures.PAGE.read_text() == architectures.page()
