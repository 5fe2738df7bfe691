"""Imports run one way: train.py -> training -> {parallel, models} -> plans."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "plans": {"models", "parallel", "training", "torchtitan", "transformers", "fla", "torchao"},
    "models": {"parallel", "training", "torchtitan"},
    "parallel": {"models", "training", "torchtitan", "transformers", "fla"},
    "training": {"train"},
}
ALLOWED = {
    ROOT / "plans" / "__main__.py": {"training"},  # at the top of the house, as train.py is
    # Float8's arithmetic, of a model that holds torchao's modules: imported when a plan is applied to one.
    **{ROOT / "plans" / name: {"torchao"} for name in ("float8.py", "float8_linear.py", "float8_border.py")},
    ROOT / "plans" / "proof" / "modes.py": {"torchao"},
}


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package):
    for file in (ROOT / package).rglob("*.py"):
        assert not imported(file) & (FORBIDDEN[package] - ALLOWED.get(file, set())), file


def test_no_two_test_files_have_one_name():
    """A process that a test starts imports its file by name alone."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_float8_is_not_imported_before_a_model_has_it():
    script = "import sys, plans, plans.proof, parallel; sys.exit('torchao' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_every_dependency_is_imported_and_every_import_is_a_dependency():
    import tomli

    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {line.split("[")[0].split("=")[0].split(">")[0].strip() for line in project["dependencies"]}
    modules = {
        "flash-linear-attention": "fla",
        "huggingface-hub": "huggingface_hub",
        "pillow": "PIL",
        "tensorboard": None,
        "triton": None,
    }
    # tensorboard is imported by torch, triton by fla.
    expected = {modules.get(name, name) for name in declared} - {None}
    packages = [*FORBIDDEN, "train"]
    files = [
        f for p in packages for f in ((ROOT / p).rglob("*.py") if (ROOT / p).is_dir() else [ROOT / f"{p}.py"])
    ]
    used = set().union(*map(imported, files)) - set(sys.stdlib_module_names) - set(packages)
    assert used == expected
