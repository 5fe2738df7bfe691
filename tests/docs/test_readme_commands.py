"""Every command of the README, and some commands of other pages, print what the pages say.

`COMMANDS` adds options that reduce cases or steps. Commands that still take minutes are tested by `make test-exhaustive`.
"""

import re
import shlex

import pytest

from tests.support import jobs
from tests.support.paths import ROOT

pytestmark = pytest.mark.thorough

QUICK = ("--quick", "--tp", "2")
"""Options with which a proof covers each condition once, at one degree."""
MINUTES = pytest.mark.exhaustive
PLANS = """
from titanplans.plans.hf.qwen import Qwen3Plan

class MyPlan(Qwen3Plan):
    def attn_plan(self, attn):
        return super().attn_plan(attn) | {"q_norm": self.replicated_off_stream()}
"""
"""`MyPlan` is the README's wrong plan. `Unmasked` is added from a block of docs/proof.md."""

COMMANDS = {
    "verify gla --tp 2": (("--quick",), 0, "proved: 2 cases"),
    "verify gla --quick": (("--tp", "2"), 0, "proved: 2 cases"),
    "verify gla --float8 tensorwise": (QUICK, 0, "proved: 2 cases"),
    "verify my_arch": ((), 2, "my_arch"),
    "verify my_plans:MyPlan --model qwen3 --tp 2": (("--quick",), 1, "self_attn.q_norm.weight"),
    "verify my_plans:Unmasked --model qwen3": (QUICK, 1, "wrong only with left padding"),
    "async-tp qwen3 --tp 2": ((), 0, "every collective that can be fused or overlapped with products is"),
    "sweep configs/experiments/tp_variants.toml": (("--dry-run",), 0, "float8-tensorwise"),
    "train --help": ((), 0, "[parallelism]"),
    "train configs/gla_debug.toml --parallelism.tensor_parallel_degree 4": (
        ("--training.seq_len=48", "--training.steps=1"),
        0,
        "Training completed",
    ),
    "train configs/gla_debug.toml --parallelism.tensor_parallel_degree 3": (
        ("--training.seq_len=48",),
        2,
        "tensor_parallel_degree = 3 does not divide num_heads = 8",
    ),
    "train configs/gla_debug.toml --training.dataset local --training.dataset_path 'notes/*.txt'": (
        ("--training.seq_len=48", "--training.steps=1"),
        0,
        "Training completed",
    ),
    "data configs/gla_340M.toml --sequences 2": (
        ("--training.dataset=stdlib",),
        2,
        'model.hf_assets_path = "fla-hub/gla-1.3B-100B": the Hub can\'t be reached',
    ),
    "fit configs/gla_340M.toml --gpus 8xH100": (("--count=1",), 0, "s a step"),
    "train configs/gla_340M.toml": (("--print-config",), 0, 'flavor = "340M"'),
    "train configs/gla_340M.toml --training.steps 20 --checkpoint.no-enable": (
        ("--print-config",),
        0,
        "steps = 20",
    ),
    "plot outputs/gla_340M": ((), 2, "outputs/gla_340M"),
    "export outputs/gla_340M/checkpoint/step-28610 gla-340M": (
        (),
        2,
        "outputs/gla_340M/checkpoint/step-28610",
    ),
    "list gla": ((), 0, "largest degree: debug 8, 340M 4"),
}
"""The arguments of each command, with added options, the exit status, and a fragment of the output.

For a command that needs a GPU or a download, the refusal is tested. Commands that the README lacks are from other pages.
"""
SLOW = ("verify gla --tp 2", "async-tp qwen3 --tp 2", "verify my_plans:MyPlan --model qwen3 --tp 2")


def commands_of_readme() -> set[str]:
    """Return the arguments of each `titanplans` command in a code block or in backticks."""
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^(?:\$ |\.venv/bin/)?titanplans ([^#\n]+)", text, re.M)
    inline = re.findall(r"`(?:\.venv/bin/)?titanplans (\w+ [^`]+)`", text)
    return {
        " ".join(message.split())
        for message in (*lines, *inline)
        if not message.startswith(("splits", "stands"))
    }


def test_every_command_of_the_readme_is_tested():
    assert commands_of_readme() <= set(COMMANDS)


def without_network(arguments: list[str]) -> None:
    """Run titanplans without the Hub, and with an empty cache of its files."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = True, "cache"
    jobs.run_titanplans(arguments)


@pytest.mark.parametrize("command", [pytest.param(c, marks=MINUTES) if c in SLOW else c for c in COMMANDS])
def test_a_command_does_what_the_readme_says(command, tmp_path):
    added, status, message = COMMANDS[command]
    proof = (ROOT / "docs" / "proof.md").read_text()
    unmasked = proof[proof.index("class Unmasked") :].partition("```")[0]
    (tmp_path / "my_plans.py").write_text(PLANS + "\n\n" + unmasked)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_text("all work and no play makes jack a dull boy\n" * 2000)
    process = jobs.start([*shlex.split(command), *added], tmp_path, without_network)
    process.join(5 * jobs.PATIENCE)
    ended = process.exitcode
    process.kill()  # does nothing if the process has ended
    printed = (tmp_path / "stdout").read_text() + (tmp_path / "stderr").read_text()
    assert ended == status, printed
    assert message in printed
