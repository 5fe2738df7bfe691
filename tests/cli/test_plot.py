"""`titanplans plot`: the logged metrics of runs, in the terminal and as pictures."""

import math

import pytest

from titanplans.cli.main import main
from titanplans.cli.plot import Curve, read
from titanplans.training.trainer.jsonl import JsonlWriter


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that writes the metrics of a run, with a loss for each step and a validation loss for every 4th."""
    monkeypatch.chdir(tmp_path)

    def write(folder: str, losses: list[float], file: str = "metrics.jsonl") -> str:
        writer = JsonlWriter(tmp_path / folder / file)
        for step, loss in enumerate(losses, 1):
            metrics = {"loss_metrics/global_avg_loss": loss, "grad_norm": step / 4}
            writer.log(metrics | {"throughput/all_devices(tps)": 1000.0 + step}, step)
            if step % 4 == 0:
                writer.log({"validation_metrics/loss": loss + 0.5}, step)
        writer.close()
        return folder

    return write


def drawn(capsys, *arguments: str) -> str:
    assert main(["plot", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert main(["plot", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_the_curves_have_the_logged_values(run):
    panels, notes = read([run("a", [8.0, 6.0, math.nan, 4.0]), run("b", [7.0])])
    loss, norm, speed = panels.values()
    assert loss == [
        Curve("a", 0, False, [1, 2, 4], [8.0, 6.0, 4.0]),
        Curve("a, validation", 0, True, [4], [4.5]),
        Curve("b", 1, False, [1], [7.0]),
    ]
    assert norm[0] == Curve("a", 0, False, [1, 2, 3, 4], [0.25, 0.5, 0.75, 1.0])
    assert speed[1].values == [1001.0]
    assert notes == ["a: loss, nats/token is not finite at step 3"]


def test_runs_are_drawn_in_one_chart_in_the_terminal(run, capsys):
    """Each run is drawn with its own character, at the height of its values. There is no colour if stdout is not a
    terminal."""
    out = drawn(capsys, run("high", [8.0] * 8), run("low", [2.0] * 8))
    assert "\x1b" not in out
    assert out.splitlines()[:4] == ["* high", "o high, validation", "+ low", "x low, validation"]
    titles = ["loss, nats/token", "norm of the gradient", "tokens/s"]
    assert [line.strip() for line in out.splitlines() if line.strip() in titles] == titles
    loss = out.partition("norm of the gradient")[0].splitlines()
    ticks = {line.partition("┤")[0].strip(): line.rpartition("┤")[2] for line in loss if "┤" in line}
    assert {height: set(ticks[height].strip(" │")) for height in ("8.5", "2.0")} == {
        "8.5": {"o"},
        "2.0": {"+"},
    }


def test_runs_are_named_by_their_paths(run):
    panels, _ = read([run("one/job", [1.0]), run("two/job", [2.0])])
    assert [curve.name for curve in panels["loss, nats/token"]] == ["one/job", "two/job"]


def test_of_the_files_of_all_ranks_the_first_is_read(run):
    run("ranks", [3.0], "rank_0/metrics.jsonl")
    run("ranks", [9.0], "rank_1/metrics.jsonl")
    assert read(["ranks"])[0]["loss, nats/token"][0].values == [3.0]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_chart_is_saved_as_a_picture(run, tmp_path, capsys, suffix):
    picture = tmp_path / f"x.{suffix}"
    assert drawn(capsys, run("a", [8.0, 4.0]), "--output", str(picture)) == f"{picture}\n"
    begins = picture.read_bytes()[:200]
    assert begins.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in begins or b"DOCTYPE svg" in begins
    less = picture.stat().st_size
    drawn(capsys, run("a", [8.0, 4.0]), run("b", [6.0, 5.0] * 9), "--output", str(picture))
    assert picture.stat().st_size > less


def test_runs_that_can_not_be_drawn_are_refused_in_one_line(run, tmp_path, capsys):
    a = run("a", [1.0])
    assert "nowhere: there is no metrics.jsonl" in refused(capsys, "nowhere")
    assert "ends with .png, .svg, .pdf" in refused(capsys, a, "--output", "x.gif")
    assert "there is no folder no" in refused(capsys, a, "--output", "no/x.png")
    (tmp_path / "a" / "metrics.jsonl").write_text("no row\n")
    assert "a/metrics.jsonl, line 1 holds no metrics" in refused(capsys, a)
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    assert "no metric has been logged there yet" in refused(capsys, a)
