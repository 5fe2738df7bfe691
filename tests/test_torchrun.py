"""torchrun's variables set a rank, or no rank, or they are refused."""

import pytest

from tests.support.paths import ROOT
from titanplans.errors import ParallelError
from titanplans.torchrun import Ranks, read_ranks
from titanplans.training.launch.main import main

COMPLETE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_the_variables_of_torchrun_give_the_rank():
    assert read_ranks({}) is None
    assert read_ranks(COMPLETE) == Ranks(1, 4, 1, 2)
    assert read_ranks(
        {name: value for name, value in COMPLETE.items() if name != "LOCAL_WORLD_SIZE"}
    ) == Ranks(1, 4, 1, 2)


WRONG = [
    *((name, value) for name in ("RANK", "LOCAL_RANK") for value in ("-1", "x", "", "0.5", " 0", "\u0660", "9" * 30, "4")),
    *((name, value) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") for value in ("0", "-1", "x", "9" * 30)),
    ("LOCAL_WORLD_SIZE", "5"),
    ("MASTER_ADDR", ""),
    *(("MASTER_PORT", value) for value in ("x", "-1", "65536", "")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_impossible_values_are_refused(monkeypatch, capsys, name, value):
    with pytest.raises(ParallelError, match=name):
        read_ranks(COMPLETE | {name: value})
    for each, setting in (COMPLETE | {name: value}).items():
        monkeypatch.setenv(each, setting)
    assert main(["no_such_job.toml"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert name in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_incomplete_variables_are_refused(missing):
    with pytest.raises(ParallelError, match=f"set, but not {missing}: start with torchrun"):
        read_ranks({name: value for name, value in COMPLETE.items() if name != missing})


def test_an_address_alone_is_not_torchrun_but_with_a_rank_it_is_an_incomplete_start(monkeypatch, capsys):
    for name in COMPLETE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert main(["no_such_job.toml"]) == 2
    assert "no such job file" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main(["no_such_job.toml"]) == 2
    assert "RANK, MASTER_ADDR set, but not WORLD_SIZE" in capsys.readouterr().err


def test_max_restarts_are_refused_under_torchrun(monkeypatch, capsys):
    for name, value in COMPLETE.items():
        monkeypatch.setenv(name, value)
    job = str(ROOT / "configs" / "gla_debug.toml")
    assert main([job, "--max-restarts=2"]) == 2
    assert "--max-restarts 2: torchrun has started this rank" in capsys.readouterr().err
    assert main([job, "--max-restarts", "-1"]) == 2
    assert "--max-restarts -1: expected" in capsys.readouterr().err
