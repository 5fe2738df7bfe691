"""`titanplans` as a user meets it: exit statuses, what is on stdout and on stderr, a plan that is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BROKEN = """
from titanplans.plans.hf.qwen import Qwen3Plan

class MyPlan(Qwen3Plan):
    '''q_norm is treated as if each rank saw all heads.'''

    def attn_plan(self, attn):
        return super().attn_plan(attn) | {"q_norm": self.replicated_before_stream()}
"""
ONE_CASE = ("--tp", "2", "--loss-parallel", "--sequence-parallel")


def run(folder: Path, *command: str, **environment: str) -> tuple[int, str, str]:
    """`command` of Python's, in `folder`, with this project importable."""
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TORCHDYNAMO_DISABLE")
    }
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_wrong_plan_of_the_users_own_exits_1_and_is_named(tmp_path):
    (tmp_path / "my_plans.py").write_text(BROKEN)
    options = ("--model", "qwen3", "--layers", "2", *ONE_CASE)
    status, out, err = run(tmp_path, "titanplans", "verify", "my_plans:MyPlan", *options)
    assert (status, err) == (1, "")  # no library's warnings either
    assert "the first 2 of 4 blocks" in out
    first = "backward: first off at model.layers.1.self_attn.q_norm.weight"
    assert first in out
    assert "each rank has its own share: not summed over the ranks" in out
    assert out.splitlines()[-1].startswith(
        "WRONG: 1 of 1 case, the first at tp 2, loss sharded, sequence sharded: "
        "backward, model.layers.1.self_attn.q_norm.weight; "
    )


def test_what_cant_be_asked_is_one_line_and_status_2(tmp_path):
    status, out, err = run(tmp_path, "titanplans", "verify", "qwen")
    assert (status, out) == (2, "")
    assert err.startswith(
        "error: verify qwen: no such model; did you mean qwen3? There are gemma3, gemma3_text, gla, "
    )
    assert err.count("\n") == 1


def test_a_process_group_proves_its_degree_and_json_is_all_of_stdout(tmp_path):
    torchrun = (
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    )
    options = ("--layers", "1", "--sequence-parallel", "--process-group", "--json")
    status, out, err = run(
        tmp_path, *torchrun, "-m", "titanplans", "verify", "gla", *options, CUDA_VISIBLE_DEVICES=""
    )
    assert status == 0, err
    found = json.loads(out)
    assert (found["verdict"], found["ranks"]) == ("proved", "2 processes over gloo, cpu")
    cases = found["report"]["cases"]
    assert [(c["degree"], c["loss_parallel"], c["sequence_parallel"]) for c in cases] == [
        (2, True, True),
        (2, False, True),
    ]
    assert all(c["minimal"] for c in found["communication"])
    assert "Traceback" not in err
