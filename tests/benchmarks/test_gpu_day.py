"""`make gpu` without a GPU: its groups of runs, the record of a run, and the page."""

import sys
import time
from importlib import metadata

import pytest
import torch

from benchmarks.gpu_day import PARTS, Machine, main
from benchmarks.gpu_runs import Run, carry_out
from tests.support.jobs import have_ended

ONE_GPU = Machine("cuda", "Some GPU", 1, None, ("gla", "qwen3"), quick=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the error without CUDA")
def test_without_cuda_it_is_refused_in_one_sentence(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: torch finds no CUDA device; use --device cpu")


@pytest.mark.parametrize(
    "machine", [ONE_GPU, ONE_GPU._replace(count=2), ONE_GPU._replace(device="cpu", count=2)]
)
def test_every_part_has_runs_with_different_names(machine):
    for name, part in PARTS.items():
        runs = list(part(machine))
        assert runs, name
        assert len({run.name for run in runs}) == len(runs), name
        assert all(run.command or run.skipped for run in runs), name
        assert part.__doc__, name


def test_one_gpu_proves_with_all_ranks_on_it_and_names_what_it_skips():
    runs = list(PARTS["verify"](ONE_GPU))
    assert [run.name for run in runs if not run.skipped] == ["gla, on one GPU", "qwen3, on one GPU"]
    assert runs[0].command[2:6] == ("verify", "gla", "--device", "cuda")
    skipped = {run.name: run.skipped for run in runs if run.skipped}
    assert skipped["every plan, tp 2"] == "needs 2 GPUs, and this is 1 GPU"
    assert list(skipped) == ["every plan, tp 2", "every plan, tp 4", "every plan, tp 8"]
    assert all(
        run.skipped == "needs 2 GPUs, and this is 1 GPU" for run in list(PARTS["async_tp"](ONE_GPU))[:1]
    )


def test_two_gpus_prove_over_two():
    runs = PARTS["verify"](ONE_GPU._replace(count=2))
    assert [run.name for run in runs if not run.skipped][2:] == ["gla, tp 2", "qwen3, tp 2"]


def test_without_the_trainer_its_parts_are_skipped_by_name():
    machine = ONE_GPU._replace(no_trainer="the Trainer, torchtitan's, needs torch 2.13")
    for part in ("loss", "tp_step", "checkpoints"):
        assert [run.skipped for run in PARTS[part](machine)] == [machine.no_trainer]


def odd(machine):
    """Yield runs of every kind."""
    yield Run("fine", ("-c", "print('| a | b |')"))
    yield Run("broken", ("-c", "print('so far'); raise SystemExit('the end of it')"))
    yield Run("refused", ("-c", "import sys; print('error: not as asked', file=sys.stderr); sys.exit(2)"))
    yield Run("slow", ("-c", "import time; print('begun', flush=True); time.sleep(600)"), 0.02)
    yield Run("left out", skipped="there is none")


def test_a_failing_run_does_not_end_the_others_and_all_are_on_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PARTS, "odd", odd)
    begin = time.monotonic()
    assert main(["--device", "cpu", "--parts", "odd", "--page", str(tmp_path / "page.md")]) == 1
    assert time.monotonic() - begin < 120
    page = (tmp_path / "page.md").read_text()
    title, *_ = page.splitlines()
    assert title.startswith("# a dry run of `make gpu` on a CPU: ")
    assert "**Nothing here was run on a GPU.**" in page
    assert f"torch {metadata.version('torch')}" in page
    rows = [line.split(" | ")[1:3] for line in page.splitlines() if line.startswith("| odd")]
    assert rows == [
        ["fine", "done"],
        ["broken", "failed, exit status 1"],
        ["refused", "refused"],
        ["slow", "took longer than 0.02 minutes"],
        ["left out", "skipped: there is none"],
    ]
    assert "```text\nso far\nthe end of it\n```" in page
    assert "```text\nbegun\n```" in page
    assert "```text\nerror: not as asked\n```" in page
    assert "slow ... took longer" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_part_runs_in_a_dry_run(tmp_path):
    assert main(["--device", "cpu", "--parts", "host_time", "--page", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| host_time --rounds 2 --only unsplit tp 2 | done |" in page
    assert "| tp 2 |" in page


def test_processes_of_a_run_end_with_it(tmp_path):
    """This includes processes that the run itself starts, as torchrun does."""
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    (result,) = carry_out("odd", [Run("parent", ("-c", code), 0.1)], dict())
    assert result.outcome == "took longer than 0.1 minutes"
    assert have_ended([int(pid.read_text())], 10), "a process still runs"


def test_concurrent_runs_end_when_their_caller_ends(tmp_path):
    pids = [tmp_path / name for name in "ab"]
    codes = [
        f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)" for pid in pids
    ]
    runs = [Run("short", ("-c", "import time; time.sleep(5)"))]
    runs += [Run(pid.name, ("-c", code)) for pid, code in zip(pids, codes, strict=True)]
    results = carry_out("odd", runs, dict(), at_once=3)
    assert next(results).run.name == "short", "it waited for another run"
    assert all(pid.exists() for pid in pids)
    results.close()
    assert have_ended([int(pid.read_text()) for pid in pids], 10), "a process still runs"


if sys.platform != "linux":
    del test_processes_of_a_run_end_with_it
