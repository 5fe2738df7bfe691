"""Twenty kills and other faults at random moments: every loss as in a run that nobody disturbed. `make survive` for more."""

import sys

import pytest

from tests.support import survival

pytestmark = pytest.mark.thorough


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_nothing_is_lost():
    counts = survival.run(faults=20, seed=1)
    faults, resumes = counts.pop("faults"), counts.pop("resumes")
    assert counts == {"mismatches": 0, "orphans": 0, "files": 0, "untold": 0}
    assert faults == 20
    assert resumes > 10
