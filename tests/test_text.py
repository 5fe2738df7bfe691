"""Output of commands is wrapped to the width of the terminal."""

import subprocess
import sys

import pytest

from titanplans.cli.main import main
from titanplans.text import columns, fitted

ROWS = [
    ("plan", "types", "n"),
    ("titanplans.plans.fla.gla:GLAPlan", "gla, hgrn, retnet", "3"),
    ("titanplans.plans.hf.llama:LlamaPlan", "llama", "12"),
]


def test_a_table_that_fits_is_unchanged():
    assert (
        columns(ROWS, right={2}, width=200)
        == columns(ROWS, right={2})
        == [
            "plan                                 types               n",
            "titanplans.plans.fla.gla:GLAPlan     gla, hgrn, retnet   3",
            "titanplans.plans.hf.llama:LlamaPlan  llama              12",
        ]
    )


def test_cells_are_wrapped_between_words_and_names():
    assert columns(ROWS, right={2}, width=40) == [
        "plan               types               n",
        "titanplans.plans.  gla, hgrn, retnet   3",
        "fla.gla:GLAPlan",
        "titanplans.plans.  llama              12",
        "hf.llama:",
        "LlamaPlan",
    ]


def test_columns_that_do_not_fit_follow_below():
    lines = columns(ROWS, right={2}, width=20)
    assert max(map(len, lines)) <= 20
    assert lines[0].split() == ["plan", "types"]
    assert lines[lines.index("") + 1].split() == ["plan", "n"]


@pytest.mark.parametrize("width", [80, 120])
def test_output_of_commands_fits_the_terminal(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    # In a new process, because other tests register plans.
    listing = subprocess.run(
        [sys.executable, "-m", "titanplans", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert "gla" in listing
    assert all(len(line) <= width for line in listing.splitlines())
    assert main(["--help"]) == 0
    for command in ("train", "verify", "async-tp", "data", "export"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
    assert all(len(line) <= width for line in capsys.readouterr().out.splitlines())


def test_a_line_is_wrapped_with_its_indentation(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert fitted("  a note of several words") == "  a note of several\n    words"
    monkeypatch.delenv("COLUMNS")
    assert fitted("  a note of several words") == "  a note of several words"
