"""Every command of the README, and some of the pages', print what is said there. Who builds the project runs `make ...`.

Proofs run with fewer cases, which `COMMANDS` says; those that take minutes then are exhaustive.
"""

import re
import shlex

import pytest

from tests.support import jobs
from tests.support.paths import ROOT

pytestmark = pytest.mark.thorough

QUICK = ("--quick", "--tp", "2")
"""Each condition once, at one degree."""
MINUTES = pytest.mark.exhaustive
PLANS = """
from titanplans.plans.hf.qwen import Qwen3Plan

class MyPlan(Qwen3Plan):
    def attn_plan(self, attn):
        return super().attn_plan(attn) | {"q_norm": self.replicated_off_stream()}
"""
"""`MyPlan` as the README has it wrong; `Unmasked` is a block of docs/proof.md."""

COMMANDS = {
    "verify gla --tp 2": (("--quick",), 0, "proved: 2 cases"),
    "verify gla --float8 tensorwise": (QUICK, 0, "proved: 2 cases"),
    "verify my_plans:MyPlan --model qwen3 --tp 2": (("--quick",), 1, "self_attn.q_norm.weight"),
    "verify my_plans:Unmasked --model qwen3": (QUICK, 1, "wrong only with left padding"),
    "async-tp qwen3 --tp 2": ((), 0, "all that can be is fused or overlapped"),
    "sweep configs/experiments/tp_variants.toml": (("--dry-run",), 0, "float8-tensorwise"),
    "train configs/gla_debug.toml --parallelism.tensor_parallel_degree 3": (
        ("--training.seq_len=48",),
        2,
        "tensor_parallel_degree = 3 does not divide num_heads = 8",
    ),
    "train configs/gla_1.3B.toml": (("--print-config",), 0, 'flavor = "1.3B"'),
    "list gla": ((), 0, "largest degree: debug 8, 340M 4"),
}
"""By the words behind `titanplans`: what is added here, the exit status, and words of what it prints.

Those that do not stand in the README are of the pages.
"""
SLOW = ("verify gla --tp 2", "async-tp qwen3 --tp 2", "verify my_plans:MyPlan --model qwen3 --tp 2")


def of_readme() -> set[str]:
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^(?:\$ |\.venv/bin/)titanplans ([^#\n]+)", text, re.M)
    inline = re.findall(r"`(?:\.venv/bin/)?titanplans (\w+ [^`]+)`", text)
    return {" ".join(words.split()) for words in (*lines, *inline)}


def test_every_command_is_here():
    assert of_readme() <= set(COMMANDS)


@pytest.mark.parametrize("command", [pytest.param(c, marks=MINUTES) if c in SLOW else c for c in COMMANDS])
def test_a_command_does_what_the_readme_says(command, tmp_path):
    added, status, words = COMMANDS[command]
    proof = (ROOT / "docs" / "proof.md").read_text()
    unmasked = proof[proof.index("class Unmasked") :].partition("```")[0]
    (tmp_path / "my_plans.py").write_text(PLANS + "\n\n" + unmasked)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    process = jobs.start([*shlex.split(command), *added], tmp_path)
    process.join(5 * jobs.PATIENCE)
    ended = process.exitcode
    process.kill()  # which does nothing where it has ended
    printed = (tmp_path / "stdout").read_text() + (tmp_path / "stderr").read_text()
    assert ended == status, printed
    assert words in printed
