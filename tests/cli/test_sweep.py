"""`titanplans sweep`: its file and cells, real jobs, resumed sweeps, time limits, signals, and the table."""

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.jobs import Job, have_ended
from tests.support.paths import ROOT
from tests.support.refusals import refusal
from titanplans.cli import sweep as command
from titanplans.cli.main import main
from titanplans.cli.sweep import METRICS, Header, read_cell_metrics, read_sweep, write_tables
from titanplans.config import ConfigError, load_job

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
HEAD = '[sweep]\nbase = "base.toml"\ndump_folder = "out"\n'
ONE = "[grid]\ntraining.steps = [1, 2]\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a sweep file next to its base job, and returns its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "base.toml").write_text(BASE)

    def write(text: str, head: str = HEAD) -> str:
        (tmp_path / "sweep.toml").write_text(head + textwrap.dedent(text), encoding="utf-8")
        return "sweep.toml"

    return write


def cells_of(path: str):
    return read_sweep(path)[1]


# The file.


def test_a_grid_is_a_product_and_named_cells_follow(write):
    cells = cells_of(
        write("""
        [set.training]
        seq_len = 64
        [grid]
        parallelism.tensor_parallel_degree = [1, 2]
        compile.enable = [false, true]
        [[cells]]
        name = "long"
        training.steps = 50
        training.seq_len = 16
        """)
    )
    assert [cell.name for cell in cells] == [
        "tensor_parallel_degree=1,compile.enable=false",  # "enable" alone would be ambiguous
        "tensor_parallel_degree=1,compile.enable=true",
        "tensor_parallel_degree=2,compile.enable=false",
        "tensor_parallel_degree=2,compile.enable=true",
        "long",
    ]
    jobs = [load_job(cell.arguments) for cell in cells]
    assert [(job.parallelism.tensor_parallel_degree, job.compile.enable) for job in jobs[:4]] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert [job.training.seq_len for job in jobs] == [64, 64, 64, 64, 16]
    assert [job.training.steps for job in jobs] == [3, 3, 3, 3, 50]
    assert all(job.metrics.enable_jsonl for job in jobs)
    assert jobs[4].job.dump_folder == "out/long"


def test_values_of_every_kind_reach_the_job(write):
    cells = cells_of(
        write(r"""
        [[cells]]
        name = "odd"
        parallelism.tensor_parallel_degree = 2
        compile.enable = true
        compile.components = ["loss"]
        compile.mode = "none"
        compile.options = {"max_autotune" = true}
        model.plan = {"model.layers.*.attn" = "attn_input"}
        activation_checkpoint.mode = "selective"
        activation_checkpoint.selective_ac_option = "op"
        activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns = ["a, b", 'c d']
        optimizer.groups = [{pattern = "norm", lr = 1e-4}]
        optimizer.lr = 1
        training.batch_size = 3
        """)
    )
    job = load_job(cells[0].arguments)
    compiled = job.compile
    assert (compiled.components, compiled.mode, compiled.options) == (("loss",), None, {"max_autotune": True})
    assert job.model.plan == {"model.layers.*.attn": "attn_input"}
    assert job.activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns == ("a, b", "c d")
    assert [(group.pattern, group.lr) for group in job.optimizer.groups] == [("norm", 1e-4)]
    assert (job.optimizer.lr, job.training.local_batch_size) == (1.0, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no cells: add a [grid]"),
        ("[grid]\ntraining.steps = 3", "[grid] training.steps = 3: expected a list"),
        ("[grid]\ntraining.stepz = [3]", "--training.stepz: no such key; did you mean training.steps?"),
        ("[grid]\ntraining.steps = [0]", "--training.steps 0: expected"),
        ("[grid]\ntraining.steps = [3, 3]", 'cell "training.steps=3": two cells have this name'),
        ("[[cells]]\nname = 'x'\n[[cells]]\nname = 'x'", 'cell "x": two cells have this name'),
        ("[[cells]]\ntraining.steps = 3", "[[cells]] 1 has no name"),
        ("[[cells]]\nname = '../x'", 'cell "../x": it is a folder\'s name'),
        ("[cells]\nname = 'x'", "expected a list of tables"),
        (ONE + "[set]\ntraining.steps = 3", "training.steps is in both [grid] and [set]"),
        (ONE + "[set]\njob.dump_folder = 'x'", "job.dump_folder can't be set, because each cell has a separate folder"),
        (ONE + "[set]\nmetrics.enable_jsonl = false", "because the table is made from the file that it writes"),
        (ONE + "[set]\ndebug.seed = 'none'", "debug.seed is unset in cell training.steps=1"),
        (ONE + "[set]\ntraining.data_probs = '1,2'", "--training.data_probs = \"1,2\" is not supported"),
        (ONE + "[training]\nsteps = 3", "no such option; there are sweep, set, grid"),
    ],
)  # fmt: skip
def test_errors_of_a_sweep_file(write, text, message):
    line = refusal(cells_of, write(text), kind=ConfigError)
    assert line.startswith("sweep.toml: ")
    assert message in line


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("", "sweep.base is missing"),
        ('[sweep]\nbas = "base.toml"\n', 'sweep.bas = "base.toml": no such option; did you mean base?'),
        ('[sweep]\nbase = "bse.toml"\n', "bse.toml: no such job file; did you mean base.toml?"),
        ('[sweep]\nbase = "base.toml"\ntiming_skip_steps = -1\n', "expected an integer, at least 0"),
    ],
)
def test_errors_of_the_sweep_table(write, head, message):
    assert message in refusal(cells_of, write(ONE, head), kind=ConfigError)


def test_under_torchrun_it_is_refused(write, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert main(["sweep", write(ONE)]) == 2
    assert "run it without torchrun" in capsys.readouterr().err


# Real jobs.

THREE = """
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


def rows() -> dict[str, dict[str, str]]:
    with Path("out", "table.csv").open() as file:
        return {row["cell"]: row for row in csv.DictReader(file)}


def states() -> dict[str, str]:
    return {name: row["state"] for name, row in rows().items()}


@pytest.mark.thorough
def test_a_sweep_continues_after_a_failing_cell_and_resumes(write, tmp_path, capsys):
    Job(tmp_path)  # writes the model and the data
    path = write(THREE, HEAD + "timing_skip_steps = 1\n")
    assert main(["sweep", path, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "first: not run\n  titanplans train base.toml --job.dump_folder=out/first " in out
    assert "would be refused: lr_scheduler.total_steps = 1: it ends before" in out
    assert not Path("out").exists()

    assert main(["sweep", path]) == 1
    assert states() == {"first": "finished", "diverges": "failed", "contradicts": "refused"}
    first, diverges, contradicts = rows().values()
    begin = json.loads(Path("out/diverges/metrics.jsonl").read_text().splitlines()[0])
    assert float(first["first loss"]) == begin["loss_metrics/global_avg_loss"], "the same data and seed"
    assert float(first["tokens/s"]) > 0
    assert 0.1 < float(first["peak memory, GiB"]) < 20
    assert (first["collectives per step"], first["validation loss"]) == ("0", "")
    assert diverges["reason"].startswith("step 2: the gradient's norm is not finite")
    assert contradicts["reason"].startswith("lr_scheduler.total_steps = 1: it ends before")
    text = Path("out/table.txt").read_text()
    assert text in capsys.readouterr().out
    assert "failed: step 2:" in " ".join(text.split())
    assert Path("out/table.png").read_bytes().startswith(b"\x89PNG")

    # After a mistake is fixed, finished cells are not run again.
    log = Path("out/first/log.txt").stat()
    path = write(THREE.replace("total_steps = 1", "warmup_steps = 2"), HEAD)
    assert main(["sweep", path]) == 1
    assert states() == {"first": "finished", "diverges": "failed", "contradicts": "finished"}
    assert Path("out/first/log.txt").stat() == log

    # The base job is changed after its cells were trained.
    (tmp_path / "base.toml").write_text(BASE.replace("steps = 3", "steps = 2"))
    capsys.readouterr()
    assert main(["sweep", path]) == 2
    line = capsys.readouterr().err
    assert "cell first was run with other settings (training.steps = 3, now 2): remove out/first" in line
    assert main(["sweep", path, "--only", "second"]) == 2
    assert "no such cell; there are first, diverges, contradicts" in capsys.readouterr().err


# A job that sleeps.

SLEEPER = """
import os, signal, sys, time
if "--debug.seed=9" in sys.argv:  # one that does not listen
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("asleep", os.getpid(), flush=True)
time.sleep(60)
"""
TWO = "[grid]\ndebug.seed = [1, 2]\n"
SWEEPER = """
import sys
from titanplans.cli import sweep as command
from titanplans.cli.main import main
command.TRAIN = [sys.executable, "sleeper.py"]
sys.exit(main(["sweep", "sweep.toml"]))
"""


@pytest.fixture
def sleeper(write, tmp_path, monkeypatch):
    Job(tmp_path)
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    write(TWO)
    monkeypatch.setattr(command, "TRAIN", [sys.executable, "sleeper.py"])
    return tmp_path


def test_a_time_limit_stops_a_cell_and_the_next_one_runs(sleeper, write):
    assert main(["sweep", write(TWO, HEAD + "time_limit_seconds = 0.5\n")]) == 1
    assert states() == {"seed=1": "failed", "seed=2": "failed"}
    assert rows()["seed=1"]["reason"] == "stopped at [sweep] time_limit_seconds = 0.5"
    assert have_ended([int(Path("out/seed=2/log.txt").read_text().split()[1])], 0)


def test_a_job_that_ignores_signals_is_killed_and_its_log_kept(sleeper, write, monkeypatch):
    monkeypatch.setattr(command, "_SECONDS_TO_STOP", 0.3)
    path = write("[grid]\ndebug.seed = [9]\n", HEAD + "time_limit_seconds = 2\n")
    assert main(["sweep", path]) == 1
    first = Path("out/seed=9/log.txt").read_text()
    assert have_ended([int(first.split()[1])], 0), "the job still runs"
    assert main(["sweep", path]) == 1
    assert Path("out/seed=9/log.txt").read_text().startswith(first)


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc for the state of processes")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_sweep_ends_its_job(sleeper, write, signum):
    started = subprocess.Popen([sys.executable, "-c", SWEEPER], env=os.environ | {"PYTHONPATH": str(ROOT)})
    log, deadline = Path("out/seed=1/log.txt"), time.monotonic() + 60
    while not log.exists() or "asleep" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started.send_signal(signum)
    assert started.wait(timeout=30) == (-signum if signum == signal.SIGKILL else 128 + signum)
    assert have_ended([int(log.read_text().split()[1])], 10), "the job still runs"
    record = json.loads(Path("out/seed=1/cell.json").read_text())
    assert (record["state"], record["reason"]) == ("failed", "it was stopped before its end")
    assert not Path("out/seed=2").exists()


# Metrics of cells.


def rows_of(steps, memory=0.5):
    return [
        {
            "step": step,
            "loss_metrics/global_avg_loss": 8.0 - step,
            "throughput/all_devices(tps)": 100.0 * step,
            "memory/peak_rss(GiB)": memory,
        }
        for step in steps
    ]


def write_rows(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_metrics_of_a_run(tmp_path):
    validation = {"step": 6, "validation_metrics/loss": 3.5, "validation_metrics/memory/peak_rss(GiB)": 0.7}
    write_rows(tmp_path / "metrics.jsonl", [*rows_of([1, 2, 4, 5, 6]), validation])
    report = {"world_size": 2, "step": {"collectives": 0, "bytes": 7_000_000}}
    (tmp_path / "parallelism.json").write_text(json.dumps(report))
    # tokens/s: the median of 400, 500 and 600, because the interval 3-4 begins after step 2.
    values = (2, 7.0, 2.0, 3.5, 500.0, 0.7, 0, 7.0)
    assert read_cell_metrics(tmp_path, skip_steps=2) == dict(zip(METRICS, values, strict=True))


def test_peak_memory_is_the_largest_ranks(tmp_path):
    for rank, memory in enumerate([0.5, 0.6, 0.4]):
        write_rows(tmp_path / f"rank_{rank}" / "metrics.jsonl", rows_of([1, 2], memory))
    assert read_cell_metrics(tmp_path, skip_steps=1)["peak memory, GiB"] == 0.6


def test_a_metric_that_was_not_logged_is_missing_and_not_0(tmp_path):
    assert read_cell_metrics(tmp_path, skip_steps=1) == {}
    write_rows(tmp_path / "metrics.jsonl", rows_of([1, 2]))
    (tmp_path / "parallelism.json").write_text('{"world_size": 2, "step": null}')
    figures = read_cell_metrics(tmp_path, skip_steps=5)
    assert "tokens/s" not in figures
    assert "collectives per step" not in figures


def test_the_csv_table_has_full_precision_and_the_varying_keys(write):
    done, waiting = cells_of(write(ONE))
    done.write("finished", "", 1.0)
    write_rows(done.folder / "metrics.jsonl", [{"step": 1, "loss_metrics/global_avg_loss": 6.123456789}])
    text = write_tables(Header(description="Why."), [done, waiting])
    assert text.splitlines()[0] == "Why."
    assert "6.12346" in text
    first, second = rows().values()
    assert (first["training.steps"], first["last loss"], first["tokens/s"]) == ("1", "6.123456789", "")
    assert (second["state"], second["last loss"]) == ("not run", "")
    assert "debug.seed" not in first, "it does not vary"


def test_known_fields_of_a_record_of_another_release_are_read(write):
    cell = cells_of(write(ONE))[0]
    cell.write("finished", "", 1.0)
    path = cell.folder / "cell.json"
    record = json.loads(path.read_text())
    del record["job"]["metrics.log_freq"]
    path.write_text(json.dumps(record))
    assert cell.read()["state"] == "finished"
    for text in ("{", "3", '{"cell": "of another release"}'):
        path.write_text(text)
        with pytest.raises(
            ConfigError, match=r"cell\.json is not the record of a cell .*: remove its folder"
        ):
            cell.read()
