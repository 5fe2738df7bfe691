"""Prints at the end of a run how many mutants were made, and what became of them."""

from mutants.tally import TALLY


def pytest_terminal_summary(terminalreporter):
    if TALLY.rows:
        terminalreporter.section("mutants")
        for line in TALLY.lines():
            terminalreporter.line(line)
