"""`titanplans verify` in new processes: a wrong plan, several models, a process group, a stopped proof."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.support import process_groups
from tests.support.paths import ROOT
from titanplans.cli.main import main

BROKEN = """
from titanplans.plans.hf.qwen import Qwen3Plan

class MyPlan(Qwen3Plan):
    '''q_norm is treated as if each rank saw all heads.'''

    def attn_plan(self, attn):
        return super().attn_plan(attn) | {"q_norm": self.replicated_off_stream()}
"""
FEW = """
import sys
from titanplans.cli.main import run
from titanplans.cli.verify import subject
subject.every_model = lambda: ["llama", "olmo2", "qwen2"]
sys.exit(run())
"""
ONE_CASE = ("--tp", "2", "--loss-parallel", "--sequence-parallel")


def run(folder: Path, *command: str, **environment: str) -> tuple[int, str, str]:
    """Run `command`, which is `titanplans` or a Python module, in `folder`; return its status, stdout and stderr.

    The project is importable.
    """
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TORCHDYNAMO_DISABLE")
    }
    arguments = ["-m", *command]
    if command[0] == "titanplans":  # an installed script, whose folder is the first on sys.path
        installed = folder / "bin" / "titanplans"
        installed.parent.mkdir(exist_ok=True)
        installed.write_text("from titanplans.cli.main import run\n\nif __name__ == '__main__':\n    run()\n")
        arguments[:2] = [str(installed)]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_wrong_plan_of_the_user_exits_with_1_and_is_named(tmp_path):
    (tmp_path / "my_plans.py").write_text(BROKEN)
    options = ("--model", "qwen3", "--layers", "2", "--quick", *ONE_CASE)
    status, out, err = run(tmp_path, "titanplans", "verify", "my_plans:MyPlan", *options)
    assert (status, err) == (1, "")  # no warnings of libraries either
    assert "the first 2 of 4 blocks" in out
    first = "backward: first wrong at model.layers.1.self_attn.q_norm.weight"
    assert first in out
    assert "the gradient is partial: not summed over the ranks" in out
    assert out.splitlines()[-1].startswith(
        "WRONG: 2 of 2 cases, the first at tp 2, loss sharded, sequence sharded: "
        "backward, model.layers.1.self_attn.q_norm.weight; "
    )


@pytest.mark.thorough
def test_several_models_are_proved_at_the_same_time(tmp_path):
    """With `--all`, reports are not mixed, and the last line has the sums. Here `--all` means three small models."""
    (tmp_path / "few.py").write_text(FEW)
    status, out, _ = run(tmp_path, "few", "verify", "--all", "--quick", *ONE_CASE)
    assert status == 0
    texts, last = out.rstrip().rsplit("\n\n", 1)
    assert last.startswith("proved: 3 models, 6 cases; ")
    titles = [line for line in texts.splitlines() if line.endswith(", flavor debug")]
    assert sorted(titles) == [f"{name}, flavor debug" for name in ("llama", "olmo2", "qwen2")]
    assert texts.count("proved: 2 cases, ") == 3


def on_a_rank(rank, port, folder):
    """Run `titanplans verify` as in a process started by torchrun."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    options = ("--layers", "1", "--sequence-parallel", "--process-group", "--json", "--quick")
    with open(folder / f"stdout.{rank}", "w") as out, redirect_stdout(out):
        assert main(["verify", "gla", *options]) == 0


def test_a_process_group_proves_its_degree_and_stdout_is_only_json(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    method = process_groups.start_method()
    mp.start_processes(on_a_rank, args=(port, tmp_path), nprocs=2, start_method=method)
    assert (tmp_path / "stdout.1").read_text() == ""
    result = json.loads((tmp_path / "stdout.0").read_text())
    assert (result["verdict"], result["ranks"]) == ("proved", "2 processes over gloo, cpu")
    cases = result["report"]["cases"]
    assert {(c["tp"], c["loss_parallel"], c["sequence_parallel"]) for c in cases} == {
        (2, True, True),
        (2, False, True),
    }


def stopped(folder: Path, arguments: list[str], until: str) -> tuple[int, str, str, str]:
    """Stop the command by SIGINT when the file matches `until`; return status, stdout, terminal (stderr) and the file."""
    written = folder / "so_far"
    master, slave = os.openpty()
    started = subprocess.Popen(
        [sys.executable, *arguments, f"--output={written}"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        start_new_session=True,
    )
    os.close(slave)
    terminal = b""
    os.set_blocking(master, False)
    end, sent = time.monotonic() + 240, False
    while started.poll() is None:
        assert time.monotonic() < end, terminal
        if not sent and written.exists() and re.search(until, written.read_text()):
            os.killpg(started.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
            sent = True
        try:
            terminal += os.read(master, 4096)
        except (
            OSError
        ) as error:  # nothing yet, or, on Linux, EIO: the process has closed the terminal and ends
            if error.errno not in (errno.EAGAIN, errno.EIO):
                raise
            time.sleep(0.02)
    assert sent
    assert started.stdout is not None
    return started.returncode, started.stdout.read(), terminal.decode(), written.read_text()


@pytest.mark.thorough
def test_each_case_prints_a_row_and_a_stopped_proof_reports_its_cases(tmp_path):
    arguments = ["-m", "titanplans", "verify", "llama", "--tp=2", "--layers=1", "--vocab-size=64"]
    # the file may have more than 3 rows, because several rows may be written at once
    status, out, terminal, written = stopped(tmp_path, arguments, r"unfinished: ([3-9]|1\d) of ")
    assert status == 128 + signal.SIGINT
    assert out.startswith("llama, flavor debug\n")
    assert "unfinished: " in out.splitlines()[-1]
    assert "all of them right" in out
    assert out.count("  right  ") >= 3
    assert written == out
    assert re.findall(r"(\d+) of 12  right  tp 2, loss \w+, sequence \w+; [A-H].*?; worst ", terminal)[
        :3
    ] == ["1", "2", "3"]


@pytest.mark.thorough
def test_a_proof_stopped_before_its_first_case(tmp_path):
    status, out, _, written = stopped(tmp_path, ["-m", "titanplans", "verify", "llama", "--tp=2"], "^$")
    assert (status, out, written) == (128 + signal.SIGINT, "stopped before the first case\n", "")


@pytest.mark.thorough
def test_a_stopped_proof_of_several_models_reports_the_finished_ones(tmp_path):
    (tmp_path / "few.py").write_text(FEW)
    arguments = [
        "-m",
        "few",
        "verify",
        "--all",
        "--quick",
        "--tp=2",
        "--loss-parallel",
        "--sequence-parallel",
    ]
    status, out, terminal, written = stopped(tmp_path, arguments, "proved: 2 cases")
    assert status == 128 + signal.SIGINT
    assert "unfinished: " in out.splitlines()[-1]
    assert " of 3 models, all of them proved; " in out.splitlines()[-1]
    assert written.endswith(out.splitlines()[-1] + "\n")
    assert "0 of 3 models; " in terminal


@pytest.mark.thorough
def test_the_output_file_has_the_printed_report(tmp_path, capsys):
    written = tmp_path / "proof.json"
    arguments = [
        "verify",
        "llama",
        "--tp=2",
        "--layers=1",
        "--vocab-size=64",
        "--quick",
        "--json",
        f"--output={written}",
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["verdict"] == "proved"
    assert written.read_text() == out
