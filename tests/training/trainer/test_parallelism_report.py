"""The parallelism report that a job writes and logs, on two ranks that run all cases."""

import json
import logging
import os
from pathlib import Path

import pytest

from tests.support import process_groups
from tests.support.trained_jobs import DEGREE, train, write_inputs

pytestmark = pytest.mark.thorough

STEPS = "--training.steps=3"  # the second step is measured; with a pipeline, the third, too
CONTEXT = "--parallelism.context_parallel_degree=2"
PIPELINE = "--parallelism.pipeline_parallel_degree=2"
COMPILED = ("--compile.enable", "--compile.backend=aot_eager", "--compile.components=model,loss")
CASES = {
    "tp": (DEGREE,),
    "accumulated": (DEGREE, "--training.local_batch_size=2", "--training.gradient_accumulation_steps=2"),
    "fsdp": (),
    "ddp": ("--parallelism.data_parallel_strategy=ddp", "--parallelism.data_parallel_replicate_degree=2"),
    "cp": (CONTEXT,),
    "cp ddp": (CONTEXT, "--parallelism.data_parallel_strategy=ddp"),
    "float8": (
        DEGREE,
        "--quantize.linear.float8.recipe_name=tensorwise",
        "--quantize.linear.float8.emulate",
    ),
    "compiled": (DEGREE, *COMPILED),
    "pp": (PIPELINE,),
    "pp compiled": (PIPELINE, *COMPILED, "--parallelism.pipeline_parallel_split_points=model.layers.1"),
}

UNMEASURED = ("accumulated", "ddp", "float8", "pp")
"""Cases that are trained again without a measured step. test_summary.py compares the steps of each strategy."""


class Lines(logging.Handler):
    """Collects the lines that the report logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        if record.name == "titanplans.training.trainer.parallelism_report":
            self.lines.append(record.getMessage())


def run(folder: Path, name: str, *options: str, measured: bool = True):
    """Return a run's losses and norms, its report file at the start and at the end, and the report's logged lines."""
    file = folder / name / "parallelism.json"
    states = []

    def prepare(trainer):
        start = trainer.report.start

        def noted():
            start()
            if file.exists():  # rank 0 writes it
                states.append(json.loads(file.read_text()))

        trainer.report.start = noted

    handler = Lines()
    logger = logging.getLogger("titanplans.training.trainer.parallelism_report")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    off = () if measured else ("--metrics.no-measure_first_step",)
    recorder, _ = train(folder, "gla", name, STEPS, *options, *off, prepare=prepare)
    logger.removeHandler(handler)
    states += [json.loads(file.read_text())] if file.exists() else []
    return (recorder.losses(), recorder.losses("grad_norm")), states, handler.lines


def on_two_ranks(rank: int) -> dict:
    import torch

    from titanplans.errors import UserError

    folder = Path(os.environ["TEST_FOLDER"])
    results = {}
    for name, options in CASES.items():
        results[name] = run(folder, name, *options)
    for name in UNMEASURED:
        unmeasured, states, _ = run(folder, f"{name} unmeasured", *CASES[name], measured=False)
        results["same", name] = unmeasured == results[name][0]
        results["unmeasured"] = states
    results["pictures"] = {path.name: path.read_text() for path in (folder / "pp").glob("*.svg")}
    results["files"] = sorted(str(path.relative_to(folder)) for path in folder.glob("tp/**/*.part"))
    with torch.compiler.set_stance("force_eager"), pytest.raises(UserError) as error:
        run(folder, "eager", *CASES["compiled"])
    results["eager"] = str(error.value)
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    write_inputs(tmp_path_factory.mktemp("jobs"))
    return process_groups.run(on_two_ranks, 2)


@pytest.mark.parametrize("case", CASES)
def test_a_job_reports_its_parallelism(two_ranks, case):
    (losses, _), (start, end), lines = two_ranks[case]
    assert list(losses) == [1, 2, 3]
    assert start["measured_after_step"] is None
    assert start["step"] is None
    assert start["reasons"]["step"] == "no step was measured yet"
    # In the first step DDP has not rebuilt its buckets, and the stages of a pipeline infer shapes.
    assert end["measured_after_step"] == (2 if "ddp" in case or "pp" in case else 1)
    measured = ("measured_after_step", "step", "blocks", "other_modules", "graphs", "reasons")
    if (pipeline := start["pipeline"]) is not None:
        assert pipeline.pop("measured") is None
        assert end["pipeline"].pop("measured").keys() == {"step", "idle_fraction", "seconds"}
    assert {key: end[key] for key in start if key not in measured} == {
        key: value for key, value in start.items() if key not in measured
    }
    assert lines[0].startswith(f"Parallelism: {'ddp' if 'ddp' in case else 'fsdp2'} on 2 ranks")
    begins = f"Step {end['measured_after_step']}: {end['step']['collectives']} coll"
    assert any(line.startswith(begins) for line in lines)
    waits = (
        "compiling blocks, loss with aot_eager in the first step, which may take minutes; its line follows"
    )
    assert [at for at, line in enumerate(lines) if line == waits] == ([2] if "compiled" in case else [])
    picture = 4 if "pp" in case else 0  # lines of the picture: title, two stages, and the measured times
    assert len([line for line in lines if line != waits]) <= 6 + picture, "a few lines, not a dump"


def test_a_job_that_measures_nothing_trains_the_same_and_says_so(two_ranks):
    assert all(two_ranks["same", name] for name in UNMEASURED), "losses and gradient norms are bit-identical"
    for report in two_ranks["unmeasured"]:
        assert report["measured_after_step"] is None
        assert [report[field] for field in ("step", "blocks", "other_modules", "graphs")] == [None] * 4
        assert set(report["reasons"].values()) == {"metrics.measure_first_step = false"}


def test_the_totals_are_sums_over_modules(two_ranks):
    for case in CASES:
        report = two_ranks[case][1][-1]
        for key in ("collectives", "bytes", "fused"):
            step = report["step"]
            assert step[key] == sum(group[key] for group in step["by_group"].values())
            assert step[key] == sum(phase[key] for phase in step["by_phase"].values())
        for ours, theirs in (("count", "collectives"), ("bytes", "bytes")):
            rows = [
                row[ours] * len(kind["names"]) for kind in report["blocks"] for row in kind["collectives"]
            ]
            rows += [row[ours] for part in report["other_modules"] for row in part["collectives"]]
            assert sum(rows) == report["step"][theirs]


def test_reductions_for_the_log_are_counted_separately(two_ranks):
    # When it logs, torchtitan reduces the loss, its maximum and the tokens over the data-parallel ranks.
    assert two_ranks["fsdp"][1][-1]["step"]["log"]["collectives"] == 3
    assert two_ranks["tp"][1][-1]["step"]["log"]["collectives"] == 0
    assert two_ranks["fsdp"][1][-1]["step"]["by_group"].keys() == {"fsdp"}
    assert two_ranks["ddp"][1][-1]["step"]["by_group"].keys() == {"dp_replicate"}


def test_a_collective_is_named_by_its_purpose(two_ranks):
    """With context parallelism alone, heads are exchanged and gradients summed over the same two ranks."""
    data = {"all_gather": "fsdp", "reduce_scatter": "fsdp", "all_reduce": "fsdp"}
    for case, sums in (("cp", data), ("cp ddp", {"all_reduce": "dp_cp"})):
        report = two_ranks[case][1][-1]
        rows = [row for part in (*report["blocks"], *report["other_modules"]) for row in part["collectives"]]
        pairs = {(row["operation"], row["group"]) for row in rows if row["phase"] != "update"}
        assert ("all_to_all", "cp") in pairs
        assert {pair for pair in pairs if pair[1] != "cp"} <= sums.items()
        assert not {(operation, "cp") for operation in sums} & {p for p in pairs if p[0] != "all_gather"}
        assert report["step"]["by_group"]["cp"]["collectives"] > 0


def test_a_pipeline_is_described_measured_and_drawn(two_ranks):
    report, lines = two_ranks["pp"][1][-1], two_ranks["pp"][2]
    first, last = report["pipeline"]["stages"]
    assert (first["rank"], first["blocks"], first["tensors_received"]) == (0, ["model.layers.0"] * 2, 0)
    assert (last["rank"], last["blocks"], last["tensors_received"]) == (1, ["model.layers.1"] * 2, 1)
    assert first["flops_per_token"] < last["flops_per_token"], "the last stage has the head"
    assert 0 < report["pipeline"]["idle_fraction"] < 1
    assert report["meshes"] == {"pp": {"ranks": 2, "backend": "gloo"}}
    assert report["step"]["by_group"].keys() == {"pp"}
    counts = {name: sums["collectives"] for name, sums in report["step"]["by_operation"].items()}
    assert (counts["send"], counts["receive"]) == (4, 4), "one for each micro batch, and one for its gradient"
    title = next(line for line in lines if line.startswith("1F1B, 4 micro batches: "))
    assert f"{report['pipeline']['idle_fraction']:.1%} idle" in title
    row = lines[lines.index(title) + 1]
    assert row.startswith("rank 0 stage 0 F")
    assert lines[-1].startswith("Step 3: the pipeline took ")
    assert two_ranks["pictures"].keys() == {"pipeline.svg", "pipeline_measured.svg"}
    boxes = {name: picture.count('height="22"') for name, picture in two_ranks["pictures"].items()}
    assert set(boxes.values()) == {2 * 2 * 4}, (
        "one box for forward and backward of each micro batch in each stage"
    )


def test_the_graphs_of_a_pipeline_are_from_its_first_step(two_ranks):
    (kind,) = two_ranks["pp compiled"][1][-1]["graphs"]["blocks"]
    assert kind["ran_compiled"] == 1
    assert kind["graphs"] > 0


def test_a_float8_gather_has_a_quarter_of_the_bytes_of_float32(two_ranks):
    plain, float8 = (two_ranks[case][1][-1] for case in ("tp", "float8"))
    (last_plain,), (last_float8,) = (
        [
            row["bytes"]
            for row in report["blocks"][-1]["collectives"]
            if (row["phase"], row["operation"]) == ("forward", "all_gather")
        ]
        for report in (plain, float8)
    )
    assert last_plain == 4 * last_float8
    assert float8["float8"]["recipe"] == "tensorwise"
    assert plain["float8"] is None
    assert any("in float8 (tensorwise, emulated), 0 left out" in line for line in two_ranks["float8"][2])


def test_a_job_that_falls_back_from_compilation_ends(two_ranks):
    assert "model.layers.0 was to be compiled, but ran eagerly" in two_ranks["eager"]
    assert "\n" not in two_ranks["eager"]


def test_no_partial_file_is_left(two_ranks):
    assert two_ranks["files"] == []
