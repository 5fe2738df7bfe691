"""Sweeps that run: real jobs and a resumed sweep; and, with a job that only sleeps, limits, Ctrl-C and kills."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import Job, gone

from titanplans.cli.main import main
from titanplans.cli.sweep import main as command

ROOT = Path(__file__).parents[2]
BASE = """
[model]
config = "gla.json"
[training]
dataset_path = "text.txt"
local_batch_size = 2
seq_len = 32
steps = 3
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[debug]
seed = 5
"""
SWEEP = """
[sweep]
base = "base.toml"
dump_folder = "out"
timing_skip_steps = 1
[[cells]]
name = "first"
[[cells]]
name = "diverges"
optimizer.lr = 1e30
lr_scheduler.warmup_steps = 1
[[cells]]
name = "contradicts"
lr_scheduler.total_steps = 1
"""
QUICK = r"""
import json, pathlib, sys
out = pathlib.Path(next(word for word in sys.argv if "dump_folder" in word).partition("=")[2])
row = {"step": 1, "loss_metrics/global_avg_loss": 8.5, "throughput/all_devices(tps)": 1.0}
(out / "metrics.jsonl").write_text(json.dumps(row) + "\n")
"""
"""A job that does nothing but leave a figure."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    Job(tmp_path)  # its model and data
    return tmp_path


def record(name: str) -> dict:
    return json.loads(Path("out", name, "cell.json").read_text())


def states() -> dict[str, str]:
    with Path("out", "table.csv").open() as file:
        return {row["cell"]: row["state"] for row in csv.DictReader(file)}


def test_a_sweep_survives_a_failing_cell_and_is_resumed(folder, capsys, monkeypatch):
    assert main(["sweep", "sweep.toml"]) == 1
    assert states() == {"first": "finished", "diverges": "failed", "contradicts": "refused"}
    first, diverges, contradicts = map(record, ("first", "diverges", "contradicts"))
    begin = json.loads((folder / "out" / "diverges" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["figures"]["loss_first"] == begin["loss_metrics/global_avg_loss"], "the same data and seed"
    assert first["figures"]["tokens_per_second"] > 0
    assert 0.1 < first["figures"]["peak_memory_gib"] < 20
    assert first["figures"]["collectives_per_step"] == 0, "one rank"
    assert diverges["exit_status"] == 1
    assert diverges["line"].startswith("step 2: the gradient's norm is not finite")
    assert contradicts["line"].startswith("lr_scheduler.total_steps = 1: it ends before")
    assert f"- `diverges`: {diverges['line']}" in Path("out/table.md").read_text()

    # Half done: a cell was running when the sweep was killed. From here on another program stands in for the jobs.
    (folder / "quick.py").write_text(QUICK)
    monkeypatch.setattr(command, "TRAIN", [sys.executable, "quick.py"])
    (folder / "out" / "diverges" / "cell.json").write_text(json.dumps(diverges | {"state": "interrupted"}))
    text = SWEEP.replace("optimizer.lr = 1e30\n", "optimizer.lr = 1e-3\n")
    text = text.replace("timing_skip_steps = 1", "timing_skip_steps = 9")
    (folder / "sweep.toml").write_text(text)
    written = (folder / "out" / "first" / "log.txt").stat()
    capsys.readouterr()
    assert main(["sweep", "sweep.toml"]) == 0
    assert "[1/3] first: finished before\n" in capsys.readouterr().out
    assert (folder / "out" / "first" / "log.txt").stat() == written
    assert states() == {"first": "finished", "diverges": "finished", "contradicts": "refused"}
    reason = "no interval was logged that begins after step 9"
    reasons = {name: value for name, value in record("first")["figures"].items() if isinstance(value, str)}
    assert reasons == {"loss_validation": "validation.enable = false", "tokens_per_second": reason}
    first = record("first")
    assert (folder / "out" / "diverges" / "log.txt").read_text() == "", "other settings left it"

    # The base job changes below cells that have finished.
    (folder / "base.toml").write_text(BASE.replace("steps = 3", "steps = 2"))
    capsys.readouterr()
    assert main(["sweep", "sweep.toml"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: sweep.toml: cell first has finished with other settings: ")
    assert ": training.steps = 3, now 2: --rerun changed " in said.err
    assert said.out == ""
    assert record("first") == first
    assert main(["sweep", "sweep.toml", "--only", "contradicts"]) == 2, "all of them refused"
    assert states() == {"first": "not run", "diverges": "not run", "contradicts": "refused"}
    assert "8." not in "".join(
        line for line in Path("out/table.md").read_text().splitlines() if line.startswith("|")
    )
    capsys.readouterr()
    assert main(["sweep", "sweep.toml", "--dry-run", "--only", "first"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "first: has finished with other settings: training.steps = 3, now 2\n  titanplans train base.toml "
    )
    assert main(["sweep", "sweep.toml", "--rerun", "all", "--only", "first"]) == 0
    assert record("first")["figures"]["loss_first"] == 8.5


def test_under_torchrun_it_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert main(["sweep", "sweep.toml"]) == 2
    assert "run it without torchrun" in capsys.readouterr().err


# ---------------------------------------------------------------- a job that sleeps

SLEEPER = """
import os, signal, subprocess, sys, time
if "--debug.seed=9" in sys.argv:  # one that does not listen, and has a child
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("child", child.pid, flush=True)
print("asleep", os.getpid(), flush=True)
time.sleep(60)
"""
TWO = '[sweep]\nbase = "base.toml"\ndump_folder = "out"\n[grid]\ndebug.seed = [1, 2]\n'
SWEEPER = """
import sys
from titanplans.cli.sweep import main as command
from titanplans.cli.main import main
command.TRAIN = [sys.executable, "sleeper.py"]
sys.exit(main(["sweep", "sweep.toml"]))
"""


@pytest.fixture
def sleeper(folder, monkeypatch):
    (folder / "sleeper.py").write_text(SLEEPER)
    (folder / "sweep.toml").write_text(TWO)
    monkeypatch.setattr(command, "TRAIN", [sys.executable, "sleeper.py"])
    return folder


def sweep(folder: Path) -> tuple[subprocess.Popen, int]:
    """Start a sweep, and wait until its first job sleeps; return both processes."""
    started = subprocess.Popen(
        [sys.executable, "-c", SWEEPER],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=(folder / "said").open("w"),
    )
    log, deadline = folder / "out" / "seed=1" / "log.txt", time.monotonic() + 60
    while not log.exists() or "asleep" not in log.read_text():
        assert time.monotonic() < deadline, log
        time.sleep(0.02)
    return started, int(log.read_text().split()[1])


on_linux = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads the state of processes from /proc"
)


def test_a_time_limit_stops_a_cell_and_the_next_one_runs(sleeper, capsys):
    (sleeper / "sweep.toml").write_text(TWO.replace("[grid]", "time_limit_seconds = 0.3\n[grid]"))
    start = time.monotonic()
    assert main(["sweep", "sweep.toml"]) == 1
    assert time.monotonic() - start < 20
    assert states() == {"seed=1": "failed", "seed=2": "failed"}
    assert record("seed=1")["line"] == "stopped at [sweep] time_limit_seconds = 0.3"
    assert record("seed=1")["exit_status"] == -signal.SIGTERM


def test_a_checkpoint_of_other_settings_is_not_deleted_without_a_word(sleeper, capsys):
    limited = TWO.replace("[1, 2]", "[1]").replace("[grid]", "time_limit_seconds = 0.3\n[grid]")
    (sleeper / "sweep.toml").write_text(limited)
    assert main(["sweep", "sweep.toml"]) == 1
    checkpoint = sleeper / "out" / "seed=1" / "checkpoint"
    checkpoint.mkdir()
    assert main(["sweep", "sweep.toml"]) == 1, "the same settings: it would go on from there"
    assert checkpoint.exists()

    (sleeper / "sweep.toml").write_text(limited + "[set]\ntraining.steps = 9\n")
    capsys.readouterr()
    assert main(["sweep", "sweep.toml"]) == 2
    said = capsys.readouterr().err
    assert "cell seed=1 has a checkpoint with other settings: training.steps = 3, now 9" in said
    assert checkpoint.exists()
    assert main(["sweep", "sweep.toml", "--rerun", "changed"]) == 1
    assert not checkpoint.exists()


@on_linux
def test_a_job_that_does_not_listen_is_killed_with_its_children(sleeper, monkeypatch):
    monkeypatch.setattr(command, "_SECONDS_TO_STOP", 0.3)
    (sleeper / "sweep.toml").write_text(
        TWO.replace("[1, 2]", "[9]").replace("[grid]", "time_limit_seconds = 2\n[grid]")
    )
    assert main(["sweep", "sweep.toml"]) == 1
    assert record("seed=9")["exit_status"] == -signal.SIGKILL
    child = int((sleeper / "out" / "seed=9" / "log.txt").read_text().split()[1])
    assert gone([child], 10), "it lives on"


@on_linux
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_and_leaves_the_table(sleeper, signum):
    started, job = sweep(sleeper)
    started.send_signal(signum)
    assert started.wait(timeout=30) == 128 + signum
    assert gone([job], 0)
    assert states() == {"seed=1": "interrupted", "seed=2": "not run"}
    assert "stopped; out/table.csv" in (sleeper / "said").read_text()


@on_linux
@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGKILL])
def test_a_sweep_runs_once_and_a_killed_one_takes_its_job_with_it(sleeper, capsys, signum):
    started, job = sweep(sleeper)
    assert main(["sweep", "sweep.toml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: [sweep] dump_folder: out: another job writes to ")
    assert f", process {started.pid} on " in said
    started.send_signal(signum)
    started.wait()
    assert gone([job], 10), "it lives on"
    assert record("seed=1")["state"] == "interrupted"

    (sleeper / "sweep.toml").write_text(TWO.replace("[grid]", "time_limit_seconds = 0.3\n[grid]"))
    assert main(["sweep", "sweep.toml"]) == 1
    assert states() == {"seed=1": "failed", "seed=2": "failed"}
