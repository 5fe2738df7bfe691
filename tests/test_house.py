"""Imports run one way: cli -> training -> {parallel, modeling} -> tensor_parallel -> config.

`proof` and `observe` stand on `tensor_parallel` and are used from above; `plans/` and `models/` import `titanplans` alone.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = {"torchtitan", "transformers", "fla", "torchao"}
ABOVE = {
    "config": {
        "tensor_parallel",
        "proof",
        "observe",
        "parallel",
        "modeling",
        "training",
        "cli",
        "torch",
        *LIBRARIES,
    },
    "tensor_parallel": {"proof", "parallel", "modeling", "training", "cli", *LIBRARIES},
    "proof": {"parallel", "modeling", "training", "cli", *LIBRARIES},
    "observe": {"proof", "parallel", "modeling", "training", "cli", *LIBRARIES},
    "parallel": {"modeling", "training", "cli", *LIBRARIES - {"torchao"}},
    "modeling": {"parallel", "training", "cli", "torchtitan", "torchao"},
    "training": {"cli"},
    "cli": set(),
}
"""What a package of the engine does not import, packages of the engine and libraries alike."""
FLOAT8 = ("float8.py", "float8_linear.py", "float8_border.py", "modes.py")
"""Float8's arithmetic, of a model that holds torchao's modules: imported when a plan is applied to one."""


def imported(file: Path) -> set[str]:
    """Return what `file` imports: top-level packages, and of titanplans its packages."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [node.module or ""]
            if node.module == "titanplans":
                found = [f"titanplans.{alias.name}" for alias in node.names]
        for name in found:
            parts = name.split(".")
            names.add(parts[1] if parts[0] == "titanplans" and len(parts) > 1 else parts[0])
    return names


@pytest.mark.parametrize("package", ABOVE)
def test_imports_run_one_way(package):
    for file in (ROOT / "titanplans" / package).rglob("*.py"):
        allowed = {"torchao"} if file.name in FLOAT8 else set()
        assert not imported(file) & (ABOVE[package] - allowed), file


@pytest.mark.parametrize("folder", ["plans", "models"])
def test_what_people_add_imports_titanplans_alone(folder):
    for file in (ROOT / folder).rglob("*.py"):
        engine = {path.name for path in (ROOT / "titanplans").iterdir() if path.is_dir()}
        assert not imported(file) & (engine | LIBRARIES), file


def test_the_engine_names_no_plan():
    for file in (ROOT / "titanplans").rglob("*.py"):
        assert "plans" not in imported(file), file


def test_no_two_test_files_have_one_name():
    """A process that a test starts imports its file by name alone."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_folders_of_plans_and_models_are_not_packages_of_their_own():
    for folder in ("plans", "models"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert f"this folder is imported as titanplans.{folder}, not as {folder}" in done.stderr


def test_only_the_trainer_uses_what_torch_2_11_lacks():
    """What a release has can't be told from another one: tests/torch_2_11_lacks.txt lists the difference."""
    lacks = set((ROOT / "tests" / "torch_2_11_lacks.txt").read_text().splitlines())
    files = [file for folder in ("titanplans", "plans", "models") for file in (ROOT / folder).rglob("*.py")]
    found = [
        f"{file.relative_to(ROOT)}: {used}"
        for file in files
        if "training" not in file.parts and file.name != "torch_private.py"
        for used in sorted(lacks & torch_names(ast.parse(file.read_text())))
    ]
    assert not found


def torch_names(tree: ast.AST) -> set[str]:
    """Return the names of modules, of members and of arguments in a file, but members that it asks for by a string."""
    found: set[str] = set()
    asked = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found |= {ast.unparse(node)} | ({f".{node.attr}"} if node.attr not in asked else set())
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            found |= {f"{name}({keyword.arg})" for keyword in node.keywords}
    return found


def test_the_search_for_what_torch_2_11_lacks_finds_it():
    lines = ["from torch.distributed.fsdp import DataParallelMeshDims", "model.reset_iter_state()"]
    lines += ["torch.compile(f, recompile_limit=2)", "hasattr(group, 'barrier') and group.barrier()"]
    used = torch_names(ast.parse("\n".join(lines)))
    assert used >= {
        "torch.distributed.fsdp.DataParallelMeshDims",
        ".reset_iter_state",
        "compile(recompile_limit)",
    }
    assert ".barrier" not in used


IMPORTS = """
import sys

def absent(*names):
    assert not (found := [name for name in sys.modules if name.startswith(names)]), found

import titanplans.parallel, titanplans.proof
absent("torchao", "transformers", "fla")  # before a model has it
from titanplans.config.families import families
families()
absent("fla.", "transformers.models.llama")  # sizes are data
import titanplans.training.job.checks
absent("torchtitan")  # it looks for the device, which has to be chosen before
import torchtitan.tools.utils
from titanplans.training.trainer.device import prepare_device
try:
    prepare_device()
except RuntimeError as error:
    assert "torchtitan was imported before prepare_device()" in str(error), error
else:
    raise AssertionError("too late, and not refused")
"""


def test_an_import_brings_no_more_than_it_needs():
    subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS], check=True, cwd=ROOT)


def test_every_dependency_is_imported_and_every_import_is_a_dependency():
    import tomli

    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {line.split("[")[0].split("=")[0].split(">")[0].strip() for line in project["dependencies"]}
    modules = {
        "annotated-types": "annotated_types",
        "flash-linear-attention": "fla",
        "huggingface-hub": "huggingface_hub",
        "tomli-w": "tomli_w",
        "tensorboard": None,
    }
    # tensorboard is imported by torch.
    expected = {modules.get(name, name) for name in declared} - {None}
    files = [f for p in ("titanplans", "plans", "models") for f in (ROOT / p).rglob("*.py")]
    ours = {path.stem for path in (ROOT / "titanplans").iterdir()} | {"titanplans", *_public()}
    used = set().union(*map(imported, files)) - set(sys.stdlib_module_names) - ours
    assert used == expected


def _public() -> list[str]:
    import titanplans

    return titanplans.__all__
