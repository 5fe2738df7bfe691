"""`python train.py` as a user runs it: exit statuses, output, and ranks that die."""

import json
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import Job, descendants, have_ended
from tests.support.paths import ROOT
from titanplans.cli.main import main, run

pytestmark = pytest.mark.thorough

TRAIN = ROOT / "train.py"


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def as_a_user(arguments):
    """Replace this process by one that imports everything itself, as a user's process does."""
    os.environ["WANDB_MODE"] = "offline"
    os.execv(sys.executable, [sys.executable, str(TRAIN), *arguments[1:]])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to list children of a process")
def test_a_killed_rank_ends_the_job_and_its_run_is_recorded(job):
    process = job.start("--metrics.enable_wandb", entry=as_a_user)
    job.wait_for_steps(process, 13)
    first, *_, second = descendants(process.pid)  # between the two ranks is a process of wandb
    os.kill(second, signal.SIGKILL)
    killed = time.monotonic()
    assert job.end(process) == 1
    assert time.monotonic() - killed < 10
    assert have_ended([first], 0), "the other rank lives on"
    *others, last = (line for line in job.err.splitlines() if not line.startswith("wandb: "))
    assert last.startswith(f"error: rank 1 (pid {second}) was killed by SIGKILL")
    assert all(line.startswith("rank 0 failed: ") for line in others), others
    (recorded,) = (job.folder / "out").rglob("run-*.wandb")
    assert recorded.stat().st_size > 0


@pytest.fixture
def refused(job, monkeypatch, capsys):
    """Return a function that runs `titanplans train` in this process, for jobs that are refused."""
    monkeypatch.chdir(job.folder)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def refused(*options: str) -> tuple[int, str, str]:
        try:
            status = main(["train", *options])
        except SystemExit as ended:
            status = ended.code
        message = capsys.readouterr()
        return status, message.out, message.err

    yield refused
    root.handlers[:] = handlers
    root.setLevel(level)


def test_rank_of_torchrun_checks_against_its_world(refused, monkeypatch):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    status, _, stderr = refused("job.toml")
    assert status == 2
    assert "tensor_parallel_degree = 2" in stderr
    assert stderr.count("\n") == 1


MY_PLANS = """
import os
from titanplans import TPPlan, register_plan
from titanplans.training.trainer import trainer

@register_plan("exaone")
class ExaonePlan(TPPlan):
    def attn_plan(self, attn):
        projections = {name: self.colwise() for name in ("q_proj", "k_proj", "v_proj")}
        return {**self.attn_input(), **projections, "o_proj": self.rowwise()}

def forward_backward_step(self, *batch):
    if os.environ["RANK"] == "1" and self.step == 2:
        raise KeyError("first\\nsecond line")
    return real(self, *batch)

if "RANK" in os.environ:  # in the process of a rank, which is a new one where a job has code of the user's
    real, trainer.Trainer.forward_backward_step = trainer.Trainer.forward_backward_step, forward_backward_step
"""


def with_plans_in_the_folder(arguments):
    sys.path.insert(0, os.getcwd())
    run(arguments)


def test_code_of_the_user_reaches_every_rank_and_the_first_failed_rank_is_named(job, refused):
    (job.folder / "my_plans.py").write_text(MY_PLANS)
    exaone = {"model_type": "exaone", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    exaone |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (job.folder / "gla.json").write_text(json.dumps(exaone))
    options = ("--experimental.custom_import", "my_plans", "--checkpoint.no-enable")
    assert job.run(*options, entry=with_plans_in_the_folder) == 1
    err = job.err
    assert len(job.losses) == 1, "the first step runs with the user's plan, the second fails"
    assert err.count("Traceback (most recent call last):") == 1
    *_, line_of_rank_0, last = err.splitlines()
    assert err.startswith("rank 1: Traceback")
    assert re.match(r"rank 0 (failed: \w+Error: |was stopped by SIGTERM)", line_of_rank_0), line_of_rank_0
    assert re.match(r"error: rank 1 \(pid \d+\) failed: KeyError: 'first\\nsecond line'; ", last)
    status, _, err = refused("job.toml", *options[2:])
    assert (status, len(err.splitlines())) == (2, 1)
    assert "no plan is registered for LlamaForCausalLM" in err


@pytest.mark.parametrize(
    ("body", "raised"),
    [
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("exit()", "SystemExit: None"),
        ("class Mine(Exception): ...\nraise Mine('so')", "Mine: so"),
        ("raise StopIteration", "StopIteration: "),
        ("class Mine(BaseException): ...\nraise Mine('so')", "Mine: so"),
    ],
)
@pytest.mark.parametrize("where", ["module", "plan"])
def test_code_of_the_user_that_exits_is_reported_in_one_sentence(
    job, refused, monkeypatch, body, raised, where
):
    name = f"users_{abs(hash((body, where)))}"
    method = body.replace("\n", "\n        ")
    plan = (
        f"from titanplans import TPPlan\nclass P(TPPlan):\n    def attn_plan(self, attn):\n        {method}\n"
    )
    (job.folder / f"{name}.py").write_text(body if where == "module" else plan)
    monkeypatch.syspath_prepend(job.folder)
    option = f"--experimental.custom_import={name}" if where == "module" else f"--model.plan={name}:P"
    status, _, err = refused("job.toml", option)
    assert (status, err.count("\n")) == (2, 1)
    assert raised in err
    assert f"{name}.py, line " in err
