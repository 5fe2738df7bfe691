"""Combinations of options: a part of them that holds every pair runs here, and the page of all is up to date."""

import itertools

import pytest

from tests.support.pages.combinations import ALL, PAGE, cover, page, refusal, run_on_ranks

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def verdicts():
    return {combination: refusal(combination) for combination in ALL}


def options(c):
    """Return each option of a combination with its place: what it does to the sequence and to the logits apart."""
    apart = (c.tp, c.cp, "whole sequence" in c.tensor, "gathered logits" in c.tensor)
    return list(enumerate((c.kind, *apart, c.recompute, c.data, c.offload, c.schedule)))


def pairs(combination):
    return set(itertools.combinations(options(combination), 2))


@pytest.fixture(scope="module")
def results(verdicts):
    run = [c for c, why in verdicts.items() if why is None and c.ranks <= 8]
    # Seconds each: every option once, and of GLA, whose graphs test_architectures.py runs, none.
    compiled = [c for c in run if c.compiled and c.ranks < 8 and c.kind != "gla"]
    return run_on_ranks(
        [*cover([c for c in run if not c.compiled], pairs), *cover(compiled, lambda c: set(options(c)))]
    )


def test_every_pair_of_options_is_that_of_one_process(results):
    assert len(results) > 25
    wrong = {str(c): result for c, result in results.items() if isinstance(result, str)}
    assert not wrong


def test_what_is_compiled_was(results):
    graphs = {str(c): result[1] for c, result in results.items() if not isinstance(result, str)}
    compiled = {str(c) for c in results if c.compiled}
    assert compiled
    assert {c for c, number in graphs.items() if number > 0} == compiled


def test_the_page_is_what_the_code_refuses(verdicts):
    assert PAGE.read_text() == page(verdicts), (
        "run tests/support/pages/combinations.py, which writes docs/generated/combinations.md"
    )
