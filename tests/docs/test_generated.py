"""Pages under docs/generated/ equal the output of their programs."""

import sys

import pytest

from tests.support.paths import GENERATED, ROOT

sys.path.append(str(ROOT / "docs"))

from generate import FOLDER, PAGES, SLOW, main  # docs/ is not a package

EXHAUSTIVE = ("architectures.md", "models.md")
"""Pages that take half a minute, as every named size is built on the meta device."""
BY_OTHER_TESTS = ("combinations.md",)
"""The page that tests/parallel/test_combinations.py compares, because that test computes the verdicts anyway."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page.name, marks=pytest.mark.exhaustive) if page.name in EXHAUSTIVE else page.name
        for page in PAGES
        if page.name not in BY_OTHER_TESTS
    ],
)
def test_a_page_is_up_to_date(page):
    assert main([page, "--check"]) == 0, f"{page} is stale: python docs/generate.py {page}"


def test_a_stale_page_is_reported(tmp_path, monkeypatch, capsys):
    page = GENERATED / "missing.md"
    monkeypatch.setitem(PAGES, page, lambda: "text")
    assert main([page.name, "--check"]) == 1
    assert "missing.md is stale" in capsys.readouterr().out
    assert not page.exists()


def test_the_folder_has_only_generated_pages():
    expected = {page.name for page in PAGES if page.parent == FOLDER} | set(SLOW)
    assert {page.name for page in FOLDER.iterdir()} == expected
