"""The command `titanplans`: its subcommands and messages; what needs no model runs without torch."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.programs import run_python
from tests.support.releases import needs_torch_2_13
from titanplans.cli.main import COMMANDS, main

WITHOUT_TORCH = """
import sys
from titanplans.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as ended:
    status = ended.code
heavy = {"torch", "numpy", "transformers", "torchtitan", "datasets"} & sys.modules.keys()
assert not heavy, heavy
sys.exit(status)
"""


def run(*arguments: str) -> tuple[int, str, str]:
    result = run_python(*arguments)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("", 0, "titanplans verify gla"),
        ("--help", 0, "titanplans COMMAND --help"),
        ("train --help", 0, "--training.steps"),
        ("evaluate --help", 0, "--checkpoint.load_step"),
        ("evaluate", 2, "titanplans evaluate JOB.toml"),
        ("verify --help", 0, "--process-group"),
        ("list --help", 0, "list"),
        ("async-tp --help", 0, "--tp"),
        ("sweep --help", 0, "--dry-run"),
        ("plot --help", 0, "--output"),
        ("--version", 0, "titanplans 0."),
        ("train --help parallelism", 0, "--parallelism.tensor_parallel_degree"),
        ("plot configs", 2, "error: plot configs: there is no metrics.jsonl"),
        ("train configs/gla_debug.toml --print-config", 0, "tensor_parallel_degree = 2"),
        ("trian configs/gla_debug.toml", 2, "error: trian: no such command; did you mean train?"),
        ("publish", 2, "error: publish: no such command; there are train, evaluate, verify"),
        ("export --help", 0, "--max-shard-size"),
        ("import --help", 0, "initial_load_path"),
        ("train", 2, "error: no job file given"),
        ("train configs/gla_debgu.toml", 2, "error: configs/gla_debgu.toml: no such job file"),
        ("train configs/gla_debug.toml --training.stepz=3", 2, "did you mean training.steps?"),
        ("train configs/gla_debug.toml --lr_scheduler.total_steps=3", 2, "ends before training.steps"),
        ("verify gla --lyers 2", 2, "error: unrecognized arguments: --lyers 2"),
        ("verify gal", 2, "model 'gal' is unknown"),
        ("verify gla2 --quick", 2, "did you mean gla?"),
        ("async-tp lama", 2, "did you mean llama?"),
        ("verify my_plans:MyPlan --model lama", 2, "did you mean llama?"),
        ("verify gla --flavor debu", 2, "did you mean debug?"),
        ("verify gla --lora rnk=8", 2, "did you mean rank?"),
        ("verify gla --lora rank=x", 2, "--lora rank x: expected an integer"),
        ("verify my_plans:MyPlan --model gla", 2, "verify my_plans:MyPlan: no module named 'my_plans'"),
        ("list gal", 2, "list gal: no plan with a debug flavor is registered for it; did you mean gla?"),
        ("list lama", 2, "did you mean llama?"),
        ("train configs/gla_debug.toml --model.plan gal", 2, "did you mean gla?"),
        ("train configs/gla_debug.toml --model.plan my_plans:MyPlan", 2, "no module named 'my_plans'"),
        ("export confgs gla", 2, "export confgs: there is no such folder; did you mean configs?"),
        ("import configs tests", 2, "import: tests already exists and is not overwritten"),
        ("async-tp gla --tp 1", 2, "a case whose degrees are all 1 splits nothing"),
        ("sweep configs/experiments/none.toml", 2, "no such sweep file"),
        pytest.param(
            "sweep configs/experiments/tp_variants.toml --only tp9",
            2,
            "error: --only tp9",
            marks=needs_torch_2_13("jobs are refused before it"),
        ),
    ],
)
def test_arguments_are_checked_before_torch_is_imported(arguments, status, message):
    ended, out, err = run("-c", WITHOUT_TORCH, *arguments.split())
    assert ended == status, err
    assert message in (out if status == 0 else err)
    if status == 2:
        assert (out, err.count("\n")) == ("", 1)


def test_every_command_is_on_the_page(capsys):
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"    titanplans {command}" in page for command in COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [("configs/gla_debug.toml", "--print-config"), ("configs/gla_debug.toml", "--training.stepz=3")],
)
def test_train_py_and_the_command_are_the_same(arguments):
    doors = [("train.py",), ("-m", "titanplans", "train")]
    by_file, by_module = (run(*door, *arguments) for door in doors)
    assert by_file == by_module


@pytest.mark.parametrize(
    "arguments", ["--help", "train --help", "sweep configs/experiments/tp_variants.toml --dry-run"]
)
def test_a_closed_stdout_gives_no_traceback(arguments):
    """`titanplans … | head` closes stdout early."""
    ours, theirs = os.pipe()
    os.close(ours)
    result = subprocess.run(
        [sys.executable, "-m", "titanplans", *arguments.split()],
        cwd=ROOT,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")
