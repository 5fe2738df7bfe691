"""Combinations of options: a selection with every pair of options runs here, and the page of all combinations is up to
date."""

import itertools

import pytest

from tests.support.pages.combinations import ALL, PAGE, cover, page, refusal, run_on_ranks

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def verdicts():
    return {combination: refusal(combination) for combination in ALL}


def options(c):
    """Return the options of a combination with their indices; degrees, sequence and logits are separate options."""
    of_tensor = (c.tp, c.cp, "unsharded stream" in c.tensor, "gathered logits" in c.tensor)
    return list(enumerate((c.kind, *of_tensor, c.recompute, c.data, c.offload, c.schedule)))


def pairs(combination):
    return set(itertools.combinations(options(combination), 2))


@pytest.fixture(scope="module")
def results(verdicts):
    run = [c for c, why in verdicts.items() if why is None and c.ranks <= 8]
    # A compiled combination takes seconds, so the selection covers each option instead of every pair. GLA is left out,
    # because test_architectures.py compiles it.
    compiled = [c for c in run if c.compiled and c.ranks < 8 and c.kind != "gla"]
    return run_on_ranks(
        [*cover([c for c in run if not c.compiled], pairs), *cover(compiled, lambda c: set(options(c)))]
    )


def test_every_pair_of_options_gives_the_step_of_one_process(results):
    assert len(results) > 25
    errors = {str(c): result for c, result in results.items() if isinstance(result, str)}
    assert not errors


def test_compiled_combinations_ran_compiled(results):
    graphs = {str(c): result[1] for c, result in results.items() if not isinstance(result, str)}
    compiled = {str(c) for c in results if c.compiled}
    assert compiled
    assert {c for c, count in graphs.items() if count > 0} == compiled


def test_the_page_is_up_to_date(verdicts):
    assert PAGE.read_text() == page(verdicts), (
        "run tests/support/pages/combinations.py, which writes docs/generated/combinations.md"
    )
