"""Which of several ranks is reported: processes that leave reports, or none, and end."""

import multiprocessing
import os
import signal
import sys

import pytest

from titanplans.errors import RunError, UserError
from titanplans.training.launch.exit_status import REPORTS, fail, failures, is_decided, refuse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


def end(how, rank):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    status = 0
    if how == "refused":
        status = refuse(UserError("steps = 0:\nat least 1"), rank)
    elif how == "not finite":
        status = refuse(RunError("the loss is not finite"), rank)
    elif how == "failed":
        try:
            raise KeyError("first", "second")
        except KeyError as error:
            status = fail(error, rank)
    os._exit(status)


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """Return what ranks that end one after the other leave, by rank and how they do."""
    monkeypatch.setenv(REPORTS, str(tmp_path))

    def ended(*hows):
        processes = {}
        for rank, how in hows:
            processes[rank] = multiprocessing.get_context("fork").Process(target=end, args=(how, rank))
            processes[rank].start()
            processes[rank].join()
        return failures([process for _, process in sorted(processes.items())], tmp_path)

    return ended


def test_the_first_to_fail_comes_first_and_may_still_be_another(ended, capfd):
    first, second = ended((1, "failed"), (0, "failed"), (2, "well"))
    assert (first.rank, second.rank, first.status) == (1, 0, 1)
    assert first.how == "failed: KeyError: ('first', 'second')"
    assert first.traceback.startswith("Traceback (most recent call last):")
    assert not is_decided([first, second])
    assert capfd.readouterr().err == "", "the launcher prints it"


def test_a_rank_that_was_killed_is_the_first(ended):
    found = ended((0, "failed"), (1, "killed"))
    assert [failure.rank for failure in found] == [1, 0]
    assert found[0].how.startswith("was killed by SIGKILL")
    assert is_decided(found)


@pytest.mark.parametrize(("how", "status"), [("refused", 2), ("not finite", 1)])
def test_the_line_of_the_lowest_rank_is_said(ended, how, status):
    found = ended((1, how), (0, how), (2, "failed"))
    assert [(failure.rank, failure.status) for failure in found] == [(0, status), (1, status), (2, 1)]
    assert found[0].line in ("steps = 0: at least 1", "the loss is not finite")
    assert is_decided(found)


def test_a_line_that_rank_0_has_not_said_is_not_the_last_word(ended):
    assert not is_decided(ended((1, "refused"), (0, "well")))


def test_a_line_that_follows_from_a_failure_is_not_the_first(ended):
    assert [failure.rank for failure in ended((1, "failed"), (0, "not finite"))] == [1, 0]
