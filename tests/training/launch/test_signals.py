"""Signals end a job in one line, with a last checkpoint if configured; a second signal ends it at once."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.jobs import PATIENCE, Job, descendants, have_ended, start
from titanplans.training.launch.signals import Stopped, stop_on_signals

on_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads processes from /proc")
SLOW = """
import sys, time
from titanplans.training.launch.signals import Stopped, stop_on_signals
try:
    with stop_on_signals():
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            time.sleep(60)
except Stopped as stopped:
    sys.exit(stopped.exit_status)
"""


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def error_lines(job):
    """Return the error lines of a job, without warnings of libraries."""
    return [line for line in job.err.splitlines() if "Warning" not in line and "_warn_" not in line]


@on_linux
def test_sigterm_saves_a_checkpoint_and_no_step_is_lost_or_repeated(job):
    schedule = "--lr_scheduler.total_steps=100000"
    options = ("--checkpoint.save_on_signal", "--checkpoint.interval=100000", schedule)
    taken = []
    for whom in ("launcher", "group", "rank 1"):
        workers = ("--training.dataloader.num_workers=1",) if whom == "group" else ()
        process = job.start(*options, *workers)
        job.wait_for_steps(process, 4)
        if whom == "launcher":
            os.kill(process.pid, signal.SIGTERM)
        elif whom == "group":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.kill(descendants(process.pid)[1], signal.SIGTERM)
        assert job.end(process) == 0, whom
        taken += job.losses
        last = taken[-1][0]
        assert f"SIGTERM: the job ends after step {last}, which is saved" in job.out
        assert "Training completed" not in job.out
        assert "Sleeping" not in job.out
        assert job.err == ""  # the second and third job resume, without warnings of torch
        assert job.steps[-1] == last
        assert error_lines(job) == []
    assert [step for step, _ in taken] == list(range(1, last + 1))
    assert job.run(f"--training.steps={last}", "--job.dump_folder=undisturbed", schedule) == 0
    assert job.losses == taken


def slow_saving(arguments):
    """Save so slowly that a signal arrives during a save."""
    from titanplans.cli.main import run
    from titanplans.training.checkpoint.storage import CheckpointWriter

    def write_data(self, plan, planner):
        Path(f"saving-{os.environ['RANK']}").touch()
        time.sleep(1.5)
        return before(self, plan, planner)

    before, CheckpointWriter.write_data = CheckpointWriter.write_data, write_data
    run(arguments)


@on_linux
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_ctrl_c_to_the_group_while_it_saves_is_one_line(job, mode):
    process = job.start(f"--checkpoint.async_mode={mode}", "--checkpoint.interval=2", entry=slow_saving)
    job.wait_for(process, lambda: len(list(job.folder.glob("saving-*"))) == 2)
    ranks = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert job.end(process) == 130
    assert error_lines(job) == ["stopped by SIGINT; saved checkpoints are intact"]
    assert have_ended(ranks, 1)


def working(arguments):
    """Run a command with work that takes longer than the test."""
    from importlib import import_module

    from titanplans.cli.main import COMMANDS, run

    def work(_):
        Path("working").touch()
        time.sleep(PATIENCE)

    import_module(f"titanplans.{COMMANDS[arguments[0]]}").main = work
    run(arguments)


@on_linux
@pytest.mark.parametrize("arguments", [["data", "job.toml"], ["list", "--long"]])
def test_ctrl_c_of_any_command_is_one_line(job, arguments):
    process = start(arguments, job.folder, entry=working)
    job.wait_for(process, lambda: (job.folder / "working").exists())
    os.kill(process.pid, signal.SIGINT)
    assert job.end(process) == 130
    assert error_lines(job) == ["stopped by SIGINT"]


def test_a_second_signal_ends_at_once_unless_it_comes_with_the_first():
    with subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.7)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        before = time.monotonic()
        assert process.wait(timeout=60) == 130
        assert time.monotonic() - before < 2.0


def send(*signums):
    """Send these signals to this process."""
    for signum in signums:
        signal.raise_signal(signum)


def library(signum, outcome):
    """A signal arrives inside code that turns the exception of the stop into another exception, or ignores it."""
    try:
        signal.raise_signal(signum)
    except BaseException as error:
        if outcome is not None:
            raise outcome from error


@pytest.mark.parametrize("outcome", [RuntimeError("a library's own"), SystemExit(1), None])
def test_a_stop_that_a_library_converts_is_still_a_stop(outcome):
    with pytest.raises(Stopped, match="SIGINT"), stop_on_signals():
        library(signal.SIGINT, outcome)


def test_the_first_sigterm_requests_a_stop_and_the_next_signal_stops():
    requests = []
    with pytest.raises(Stopped, match="SIGINT"), stop_on_signals(first_sigterm=partial(requests.append, 1)):
        send(signal.SIGTERM, signal.SIGTERM, signal.SIGINT)
    assert requests == [1]
