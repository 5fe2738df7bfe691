"""Ranks that run a function, without a job."""

import os
from functools import partial
from pathlib import Path

from titanplans.training.launch.launcher import launch_function


def leave_environment(folder: Path) -> int:
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    (folder / os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
    return 0


def fail_on_rank_1() -> int:
    return 7 if os.environ["RANK"] == "1" else 0


def test_each_rank_runs_the_function(tmp_path):
    assert launch_function(partial(leave_environment, tmp_path), 2) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 2 2", "1 2 2"]


def test_a_rank_that_fails(capfd):
    assert launch_function(fail_on_rank_1, 2) == 1
    err = capfd.readouterr().err
    assert "error: rank 1 (pid " in err
    assert "ended with exit status 7; the other ranks were stopped" in err
    assert "checkpoint" not in err
