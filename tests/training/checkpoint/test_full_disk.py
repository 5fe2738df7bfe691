"""If the disk is full when a job writes metrics or its log, the job ends with a one-line error, as it does at a save."""

import contextlib
import errno
import os
import sys
from pathlib import Path

import pytest

from tests.support.jobs import Job, run_titanplans
from tests.support.survival import mount_small_disk
from titanplans.disk import name_file_in_errors, raise_not_saved
from titanplans.errors import NotSaved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk, and looks into /proc")


def on_a_small_disk(arguments):
    Path("out").mkdir()
    if not mount_small_disk(Path("out"), megabytes=8):
        sys.exit("no mount")
    run_titanplans(arguments)


def with_stdout_full(arguments):
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    run_titanplans(arguments)


def fill(folder):
    """Write until no space is left."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


@pytest.mark.parametrize(
    ("writer", "refused", "ranks"),
    [("jsonl", "out/metrics.jsonl", 2), ("jsonl", "out/metrics.jsonl", 1), ("tensorboard", "out", 1)],
)
def test_a_full_disk_for_metrics_ends_the_job_in_one_line(tmp_path, writer, refused, ranks):
    job = Job(tmp_path)
    options = ("--checkpoint.interval=100000", "--checkpoint.enable_first_step_checkpoint")
    options += (f"--metrics.enable_{writer}", f"--parallelism.tensor_parallel_degree={ranks}")
    process = job.start(*options, entry=on_a_small_disk)
    try:
        job.wait_for_steps(process, 2)
    except AssertionError:
        if job.err == "no mount\n":
            pytest.skip("no disk may be mounted here")
        raise
    fill(Path(f"/proc/{process.pid}/root{tmp_path}/out"))
    assert job.end(process) == 1
    assert job.err.startswith(f"error: {refused} can't be written (no space is left); ")
    assert job.err.endswith("step-1\n")
    assert job.err.count("\n") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_for_the_log_ends_the_job_in_one_line(tmp_path, ranks):
    job = Job(tmp_path)
    assert job.run(f"--parallelism.tensor_parallel_degree={ranks}", entry=with_stdout_full) == 1
    assert job.err.startswith("error: stdout can't be written (no space is left); there is no checkpoint")
    assert job.err.count("\n") == 1


@pytest.mark.parametrize(
    ("errno_of_write", "reason"),
    [
        (errno.ENOSPC, "no space is left"),
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EFBIG, "File too large"),
        (errno.EIO, "Input/output error"),
        (errno.EROFS, "Read-only file system"),
    ],
)
def test_a_failed_write_has_the_reason_of_the_system(errno_of_write, reason):
    with (
        pytest.raises(NotSaved) as raised,
        raise_not_saved(lambda: "step-4 is left"),
        name_file_in_errors("out/rows"),
    ):
        raise OSError(errno_of_write, os.strerror(errno_of_write))
    assert str(raised.value) == f"out/rows can't be written ({reason}); step-4 is left"


def test_other_errors_are_not_changed():
    with pytest.raises(PermissionError), raise_not_saved(lambda: ""):
        raise PermissionError(errno.EACCES, "may not")
