"""Only one job uses a folder: the lock, its owner, and stale locks."""

import errno
import fcntl
import os
import platform
import signal
import time
from pathlib import Path

import pytest

from titanplans.config import ConfigError
from titanplans.config.schema import build_job
from titanplans.lock import LOCK, locked_file
from titanplans.training.job.outputs import locked

SAVES = {"checkpoint.enable": True}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def job(dump="out", **options):
    values = {"job.dump_folder": dump} | SAVES | {key.replace("__", "."): v for key, v in options.items()}
    return build_job(values)


@pytest.fixture
def another():
    """Return a function that locks a job's folders in another process, and returns the id of this process."""
    pids = []

    def hold(locked_job):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with locked(locked_job):
                os.write(writer, b".")
                time.sleep(600)
        pids.append(pid)
        os.read(reader, 1)
        return pid

    yield hold
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_job_is_refused_until_the_first_has_ended(another):
    pid = another(job())
    with (
        pytest.raises(
            ConfigError,
            match=rf'^job.dump_folder = "out": another job .*/out, process {pid} on {platform.node()} since 2\d\d\d-',
        ),
        locked(job()),
    ):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with locked(job()):
        assert Path("out", LOCK).read_text().startswith(f"process {os.getpid()} on ")
        if (fork := os.fork()) == 0:  # a rank, which does not own the lock of its launcher
            os._exit(0)
        os.waitpid(fork, 0)
    assert Path("out", LOCK).read_text() == ""


def test_two_dump_folders_with_one_checkpoint_folder_are_refused(another):
    shared = str(Path("shared").absolute())
    another(job("one", checkpoint__folder=shared))
    with (
        pytest.raises(ConfigError, match=rf'^checkpoint.folder = "{shared}": another job writes to {shared}'),
        locked(job("two", checkpoint__folder=shared)),
    ):
        pass
    with locked(job("three", checkpoint__folder=shared, checkpoint__load_only=True)):
        pass  # this job only reads


@pytest.mark.parametrize("content", ["", "\n", "process 7 on elsewhere since then\n"])
def test_a_stale_lock_is_ignored(caplog, content):
    Path("out").mkdir()
    Path("out", LOCK).write_text(content)
    with locked(job()):
        assert Path("out", LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert caplog.messages == []


def test_a_file_system_without_locks_is_reported(caplog, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with locked(job()):
        pass
    assert "out can't be locked (No locks available)" in caplog.messages[0]


def test_a_process_waits_for_the_lock_of_a_file():
    file, reader_writer = Path("folder", "file.lock"), os.pipe()
    with locked_file(file):
        if (fork := os.fork()) == 0:
            with locked_file(file):
                os.write(reader_writer[1], b".")
                os._exit(0)
        os.set_blocking(reader_writer[0], False)
        time.sleep(0.2)
        with pytest.raises(BlockingIOError):
            os.read(reader_writer[0], 1)
    assert os.waitpid(fork, 0) == (fork, 0)
    assert os.read(reader_writer[0], 1) == b"."
