"""After twenty faults at random moments every loss equals the loss of an undisturbed run. `make survive` injects more."""

import sys

import pytest

from tests.support import survival

pytestmark = pytest.mark.thorough


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_losses_after_faults_are_those_of_an_undisturbed_run():
    counts = survival.run(faults=20, seed=1)
    faults, resumes = counts.pop("faults"), counts.pop("resumes")
    assert counts == {"mismatches": 0, "orphans": 0, "files": 0, "unexplained": 0}
    assert faults == 20
    assert resumes > 10
