"""Prints at the end of a run how many mutants were made, and what became of them."""

import pytest
from mutants.tally import TALLY


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist, whose controller prints
        session.config.workeroutput["mutants"] = TALLY.rows


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    TALLY.rows |= getattr(node, "workeroutput", {}).get("mutants", {})


def pytest_terminal_summary(terminalreporter):
    if TALLY.rows:
        terminalreporter.section("mutants")
        for line in TALLY.lines():
            terminalreporter.line(line)
