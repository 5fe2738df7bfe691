"""The launcher chooses which rank's failure it reports. Some ranks leave a report file, and others end without one."""

import json
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
    """Return a function that takes (rank, how it ends) pairs, ends the ranks in this order, and returns their failures."""
    monkeypatch.setenv(REPORTS, str(tmp_path))

    def ended(*hows):
        processes = {}
        for rank, how in hows:
            processes[rank] = multiprocessing.get_context("fork").Process(target=end, args=(how, rank))
            processes[rank].start()
            processes[rank].join()
        return failures([process for _, process in sorted(processes.items())], tmp_path)

    return ended


def test_the_earliest_failure_comes_first_but_a_running_rank_may_replace_it(ended, capfd):
    first, second = ended((1, "failed"), (0, "failed"), (2, "well"))
    assert (first.rank, second.rank, first.status) == (1, 0, 1)
    assert first.how == "failed: KeyError: ('first', 'second')"
    assert first.traceback.startswith("Traceback (most recent call last):")
    assert not is_decided([first, second])
    assert capfd.readouterr().err == "", "only the launcher prints it"


def test_a_killed_rank_comes_first(ended):
    failures = ended((0, "failed"), (1, "killed"))
    assert [failure.rank for failure in failures] == [1, 0]
    assert failures[0].how.startswith("was killed by SIGKILL")
    assert is_decided(failures)


@pytest.mark.parametrize(("how", "status"), [("refused", 2), ("not finite", 1)])
def test_the_line_of_the_lowest_rank_is_reported(ended, how, status):
    failures = ended((1, how), (0, how), (2, "failed"))
    assert [(failure.rank, failure.status) for failure in failures] == [(0, status), (1, status), (2, 1)]
    assert failures[0].line in ("steps = 0: at least 1", "the loss is not finite")
    assert is_decided(failures)


def test_the_line_of_another_rank_than_0_may_still_be_replaced(ended):
    assert not is_decided(ended((1, "refused"), (0, "well")))


def test_a_line_that_follows_from_a_failure_does_not_come_first(ended):
    assert [failure.rank for failure in ended((1, "failed"), (0, "not finite"))] == [1, 0]


def test_refusal_is_one_line(capsys):
    assert refuse(UserError("[training] steps = 0: at least 1"), rank=0) == 2
    assert capsys.readouterr().err == "error: [training] steps = 0: at least 1\n"


def failing(rank: int) -> int:
    try:
        return 1 // 0
    except ZeroDivisionError as error:
        return fail(error, rank)


def test_failure_of_a_rank_prints_its_traceback_and_one_line(capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert failing(rank=3) == 1
    output = capsys.readouterr().err
    assert output.startswith("rank 3: Traceback (most recent call last):")
    assert output.endswith("\nerror: rank 3 failed: ZeroDivisionError: integer division or modulo by zero\n")


def test_failure_is_reported_to_the_launcher_of_the_rank(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert failing(rank=3) == 1
    assert capsys.readouterr().err == ""
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ZeroDivisionError: integer division or modulo by zero"
    assert "return 1 // 0" in message["extraInfo"]["py_callstack"]
