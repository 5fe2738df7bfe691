"""metrics.jsonl: a resumed run is recorded as one run, and non-finite metrics are written as valid JSON."""

import json

import pytest

from titanplans.training.trainer.jsonl import JsonlWriter, read_metrics


def test_metrics_of_a_resumed_run_are_one_run(tmp_path):
    path = tmp_path / "out" / "metrics.jsonl"

    def run(steps, value):
        writer = JsonlWriter(path)
        for step in steps:
            writer.log({"loss": value}, step)
        writer.close()

    run([1, 2, 3, 4], 1.0)
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # the process is killed here
    run([3, 4, 5], 2.0)  # from the checkpoint of step 2
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 2),
    ]
    run([1, 2], 3.0)  # started again from the first step
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 3), (2, 3)]


def test_metrics_that_are_not_finite_are_json(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.log({"a": float("nan"), "b": float("inf"), "c": 3}, 1)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "a": None, "b": None, "c": 3}
