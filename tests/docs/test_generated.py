"""Pages under docs/generated/ equal the output of their programs; pages written by hand stay short."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

from generate import FOLDER, PAGES, SLOW, main  # noqa: E402  # docs/ is no package

EXHAUSTIVE = ("architectures.md", "models.md")
"""Half a minute: every named size is built on meta."""
BY_OTHER_TESTS = ("combinations.md",)
"""tests/parallel/test_combinations.py compares it with verdicts that it needs anyway."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page.name, marks=pytest.mark.exhaustive) if page.name in EXHAUSTIVE else page.name
        for page in PAGES
        if page.name not in BY_OTHER_TESTS
    ],
)
def test_a_page_is_fresh(page):
    assert main([page, "--check"]) == 0, f"{page} is stale: python docs/generate.py {page}"


def test_a_stale_page_is_told(tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / "generated" / "missing.md"
    monkeypatch.setitem(PAGES, page, lambda: "text")
    assert main([page.name, "--check"]) == 1
    assert "missing.md is stale" in capsys.readouterr().out
    assert not page.exists()


def test_the_folder_holds_generated_pages_alone():
    expected = {page.name for page in PAGES if page.parent == FOLDER} | set(SLOW)
    assert {page.name for page in FOLDER.iterdir()} == expected


def words(page: Path) -> int:
    return len(page.read_text().split())


def by_hand() -> list[Path]:
    """Return the pages of docs/ that people write: not the generated ones, nor those that `make gpu` writes."""
    return sorted((ROOT / "docs").glob("*.md"))


def test_the_readme_is_short():
    assert words(ROOT / "README.md") <= 800


def test_pages_are_few():
    assert len(by_hand()) <= 18


def test_the_architecture_is_one_screen():
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 60


def test_contributing_is_one_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60
