"""A new architecture needs one file in `plans/` and one in `models/`. Its plan is proved without other changes."""

import os
import shutil

from tests.support.paths import ROOT
from tests.support.programs import run_python

PLAN = '''\
"""The plan of EXAONE 3: a Llama."""

from titanplans import register_plan

from .llama import LlamaPlan


@register_plan("exaone")
class ExaonePlan(LlamaPlan):
    """Heads and MLP width are split, norms replicated."""
'''
SIZES = """\
# EXAONE 3, as transformers implements it.
config_class = "transformers.ExaoneConfig"

[debug] # ours
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 8
num_key_value_heads = 2
head_dim = 8
intermediate_size = 96
vocab_size = 256
"""


ALL = """
import titanplans
from titanplans.cli.main import main

print(titanplans.__file__)
assert main(["list"]) == 0
assert main(["verify", "exaone", "--tp", "2", "--quick"]) == 0
"""


def test_one_plan_and_one_table_of_sizes_are_enough(tmp_path):
    # In the layout of the wheel, plans/ and models/ are inside the engine.
    ignore = shutil.ignore_patterns("__pycache__")
    home = shutil.copytree(ROOT / "titanplans", tmp_path / "titanplans", ignore=ignore)
    for folder in ("plans", "models"):
        shutil.copytree(ROOT / folder, home / folder, ignore=ignore)
    before = {file: file.read_bytes() for file in home.rglob("*") if file.is_file()}

    (home / "plans" / "hf" / "exaone.py").write_text(PLAN)
    (home / "models" / "exaone.toml").write_text(SIZES)

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = run_python("-W", "ignore", "-c", ALL, cwd=tmp_path, env={"PYTHONPATH": path})
    assert result.returncode == 0, result.stdout + result.stderr
    assert str(tmp_path) in result.stdout.splitlines()[0]
    assert "titanplans.plans.hf.exaone:ExaonePlan" in result.stdout
    assert all(file.read_bytes() == content for file, content in before.items())
