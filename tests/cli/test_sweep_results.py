"""Results of a sweep, read from the files that each run left: figures, records, error lines and tables."""

import csv
import io
import json

import pytest

from titanplans.cli.sweep.cells import make_cells
from titanplans.cli.sweep.main import error_line
from titanplans.cli.sweep.spec import read_spec
from titanplans.cli.sweep.table import FIGURES, csv_table, markdown_table, read_figures, table
from titanplans.config import ConfigError
from titanplans.training.trainer.jsonl import JsonlWriter, read_rows

SWEEP = """
[sweep]
base = "base.toml"
[set]
debug.seed = 1
[grid]
parallelism.tensor_parallel_degree = [1, 2, 3]
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text('[model]\nname = "gla"\nflavor = "debug"\n')
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return read_spec("sweep.toml")


# ---------------------------------------------------------------- metrics.jsonl


def test_metrics_of_a_resumed_run_are_one_run(tmp_path):
    path = tmp_path / "out" / "metrics.jsonl"

    def run(steps, value):
        writer = JsonlWriter(path)
        for step in steps:
            writer.log({"loss": value}, step)
        writer.close()

    run([1, 2, 3, 4], 1.0)
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # killed here
    run([3, 4, 5], 2.0)  # from the checkpoint of step 2
    assert [(row["step"], row["loss"]) for row in read_rows(path)] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    run([1, 2], 3.0)  # over again
    assert [(row["step"], row["loss"]) for row in read_rows(path)] == [(1, 3), (2, 3)]


def test_metrics_are_json_where_a_figure_is_not_finite(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.log({"a": float("nan"), "b": float("inf"), "c": 3}, 1)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "a": None, "b": None, "c": 3}


# ---------------------------------------------------------------- figures


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


def test_figures_of_a_run(tmp_path):
    validation = {"step": 6, "validation_metrics/loss": 3.5, "validation_metrics/memory/peak_rss(GiB)": 0.7}
    write_rows(tmp_path / "metrics.jsonl", [*rows_of([1, 2, 4, 5, 6]), validation])
    (tmp_path / "parallelism.json").write_text('{"world_size": 2, "step": {"collectives": 0, "bytes": 7}}')
    found = read_figures(tmp_path, skip_steps=2)
    assert (found["loss_first"], found["loss_last"], found["loss_validation"]) == (7.0, 2.0, 3.5)
    assert found["tokens_per_second"] == 500.0, "of 400, 500, 600: the interval 3-4 begins after step 2"
    assert found["peak_memory_gib"] == 0.7
    assert (found["collectives_per_step"], found["bytes_per_step"]) == (0, 7), "none is a count, too"
    assert found["ranks"] == 2


def test_peak_memory_is_the_largest_ranks(tmp_path):
    for rank, memory in enumerate([0.5, 0.6, 0.4]):
        write_rows(tmp_path / f"rank_{rank}" / "metrics.jsonl", rows_of([1, 2], memory))
    found = read_figures(tmp_path, skip_steps=1)
    assert found["peak_memory_gib"] == 0.6


def test_a_figure_that_is_not_there_has_a_reason_and_is_no_0(tmp_path):
    found = read_figures(tmp_path, skip_steps=1)
    assert set(found) == {figure.name for figure in FIGURES}
    assert set(found.values()) == {"the run wrote no metrics.jsonl", "the run wrote no parallelism.json"}

    write_rows(tmp_path / "metrics.jsonl", [*rows_of([1]), {"step": 2, "loss_metrics/global_avg_loss": None}])
    (tmp_path / "parallelism.json").write_text('{"step": null, "reasons": {"step": "so"}}')
    found = read_figures(tmp_path, skip_steps=5)
    assert found["loss_last"] == "not finite"
    assert found["loss_validation"] == "validation.enable = false"
    assert found["tokens_per_second"] == "no interval was logged that begins after step 5"
    assert found["collectives_per_step"] == found["bytes_per_step"] == "so"


# ---------------------------------------------------------------- why a cell did not finish


FAILED = """\
12:00:00  step 1  loss 8.3
rank 1: Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'inner'
rank 0: RuntimeError: a peer is gone
error: rank 1 (pid 7) failed: KeyError: 'inner'; the other ranks were stopped
"""


@pytest.mark.parametrize(
    ("text", "status", "line"),
    [
        ("12:00:00  step 1\nerror: steps = 0: at least 1\n", 2, "steps = 0: at least 1"),
        (FAILED, 1, "rank 1 (pid 7) failed: KeyError: 'inner'; the other ranks were stopped"),
        ("error: rank 1 (pid 7) was killed by SIGKILL\n", 1, "rank 1 (pid 7) was killed by SIGKILL"),
        ("working\n", -9, "killed by SIGKILL"),
        ("Segmentation fault\n\n", 139, "Segmentation fault"),
        ("", 1, "no output"),
    ],
)
def test_error_line(text, status, line):
    assert error_line(text, status) == line


# ---------------------------------------------------------------- records


def cells_of(path="sweep.toml"):
    cells = make_cells(read_spec(path))
    for cell in cells:
        cell.read()
    return cells


def test_a_record_reads_back_and_notices_what_changed(spec, tmp_path):
    cell = cells_of()[0]
    assert cell.state == "not run"
    cell.begin()
    assert cells_of()[0].state == "interrupted"
    cell.update(state="finished")
    again = cells_of()[0]
    assert (again.record, again.state, again.changes()) == (cell.record, "finished", [])

    (tmp_path / "base.toml").write_text(
        '# other words, the same job\n[model]\nname = "gla"\nflavor = "debug"\n'
    )
    assert cells_of()[0].state == "finished"
    (tmp_path / "base.toml").write_text("[training]\nsteps = 3\n")
    assert cells_of()[0].state == "not run"
    assert cells_of()[0].changes() == [
        'model.flavor = "debug", now unset',
        'model.name = "gla", now unset',
        "training.steps = 10000, now 3",
    ]


def test_a_changed_model_file_is_noticed(spec, tmp_path):
    (tmp_path / "model.json").write_text("{}")
    (tmp_path / "base.toml").write_text('[model]\nconfig = "model.json"\n')
    cells_of()[0].begin()
    (tmp_path / "model.json").write_text("{ }")
    (change,) = cells_of()[0].changes()
    assert change.startswith('SHA-256 of model.config = "')


def test_a_key_that_came_later_stands_for_its_default(spec):
    cell = cells_of()[0]
    cell.begin()
    del cell.record["job"]["metrics.log_freq"]
    assert cell.changes() == []
    del cell.record["job"]["debug.seed"]
    assert cell.changes() == ["debug.seed = unset, now 1"]


def test_folders_of_others_are_left_alone(spec):
    cell = make_cells(spec)[0]
    cell.folder.mkdir(parents=True)
    (cell.folder / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds files, but no cell.json"):
        cell.read()
    for text in ("{", "3", '{"cell": "of another release"}'):
        (cell.folder / "cell.json").write_text(text)
        with pytest.raises(ConfigError, match=r"cell.json can't be read"):
            cell.read()


# ---------------------------------------------------------------- tables


def some_cells(spec):
    first, second, third = make_cells(spec)
    first.begin()
    figures = {
        "loss_last": 6.123456789,
        "tokens_per_second": 12345.6,
        "bytes_per_step": 2_500_000,
        "ranks": 1,
    }
    figures |= {"collectives_per_step": "the run wrote no parallelism.json"}
    first.update(state="finished", exit_status=0, seconds=3.5, figures=figures)
    second.begin()
    second.update(state="refused", exit_status=2, line="a | b")
    return [first, second, third]


def test_csv_has_every_figure_in_full_and_what_varies(spec):
    done, refused, waiting = csv.DictReader(io.StringIO(csv_table(table(some_cells(spec)))))
    assert (done["cell"], done["state"], done["parallelism.tensor_parallel_degree"]) == (
        "tensor_parallel_degree=1",
        "finished",
        "1",
    )
    assert (done["loss_last"], done["bytes_per_step"], done["collectives_per_step"]) == (
        "6.123456789",
        "2500000",
        "",
    )
    assert done["reason"] == "no collectives a step: the run wrote no parallelism.json"
    assert (refused["state"], refused["exit_status"], refused["reason"]) == ("refused", "2", "a | b")
    assert (waiting["state"], waiting["ranks"]) == ("not run", "")
    assert "debug.seed" not in done, "it does not vary"


def test_markdown_has_a_row_a_cell_and_the_reasons(spec):
    page = markdown_table(spec, table(some_cells(spec)))
    assert "1 finished, 1 refused, 1 not run" in page
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in lines} == {len(FIGURES) + 3}
    assert lines[2] == "| tensor_parallel_degree=1 | finished | 1 |  | 6.12346 |  | 12,346 |  |  | 2.50 |"
    assert lines[3].startswith("| tensor_parallel_degree=2 | refused |  |  |")
    assert "- `tensor_parallel_degree=2`: a | b" in page
    assert "- `tensor_parallel_degree=1`: no collectives a step: the run wrote no parallelism.json" in page


def test_figures_of_other_settings_are_not_shown(spec):
    cells = some_cells(spec)
    cells[0].record["job"]["training.steps"] = 1
    row = table(cells)[0]
    assert (row["state"], row["ranks"], row["loss_last"], row["reason"]) == ("not run", None, None, "")


def test_losses_over_other_data_are_said_not_to_compare(tmp_path, spec):
    (tmp_path / "sweep.toml").write_text(SWEEP.replace("[1, 2, 3]", "[1, 2]\ntraining.seq_len = [2048, 8]"))
    cells = make_cells(read_spec("sweep.toml"))
    for cell in cells:
        cell.begin()
        cell.update(state="finished", figures={"ranks": cell.job.parallelism.tensor_parallel_degree})
    reasons = [row["reason"] for row in table(cells)]
    other = f"losses don't compare with {cells[0].name}'s, which saw other data: "
    assert reasons == ["", f"{other}training.seq_len = 8, not 2048"] * 2
    cells[2].record["figures"]["ranks"] = 6  # as on a machine with six GPUs
    assert table(cells)[2]["reason"] == f"{other}data-parallel ranks = 3, not 1"
