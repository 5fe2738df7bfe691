"""Which packages each package may import (as docs/house.svg draws), and where names of other libraries may be used."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

from tests.support.imports import ENGINE, imported
from tests.support.paths import ROOT
from tests.support.programs import run_python
from titanplans.extras import EXTRAS

LIBRARIES = {"torchtitan", "transformers", "fla", "torchao"}
STRATEGIES = {"config", "plan", "styles", "split", "precision", "adapters"}
ALLOWED = {
    "config": set(),
    "split": set(),
    "styles": {"split"},
    "plan": {"config", "split", "styles"},
    "loss": {"split"},
    "precision": {"config", "plan", "styles", "split", "torchao"},
    "adapters": {"config", "plan", "split", "precision"},
    "apply": {"config", "plan", "styles", "split", "loss", "precision", "adapters"},
    "kernels": {"transformers", "fla"},
    "observe": {"plan", "styles", "split", "apply"},
    "modeling": {*STRATEGIES, "transformers", "fla"},
    "weights": {*STRATEGIES, "modeling", "transformers"},
    "parallel": {*STRATEGIES, "loss", "apply", "observe", "torchao"},
    "integrations": {*STRATEGIES, "apply", "modeling", "parallel", "weights", "torchtitan", "transformers"},
    "proof": {"plan", "styles", "split", "loss", "adapters", "apply", "kernels"},
    "derive": {"plan", "split", "modeling", "proof", "transformers"},
    "training": {*STRATEGIES, "loss", "apply", "observe", "modeling", "weights", "parallel", "kernels", *LIBRARIES},
    "foresight": {*STRATEGIES, "loss", "observe", "modeling", "parallel", "kernels", "training", "transformers"},
}  # fmt: skip
"""The packages and libraries that each package of the engine may import. `cli` may import all of them."""
FLOAT8 = ("split/converted.py", "proof/compare/float8.py")
"""Files that handle modules of torchao, and import torchao only for a model that has such modules."""
ROOMS = {
    "ranks": {"ranks"},
    "batches": {"batches"},
    "compare": {"batches", "ranks", "compare"},
    "explain": {"batches", "ranks", "compare", "explain"},
}
"""The subpackages of the proof, with the subpackages that each may import."""


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package):
    forbidden = {*ALLOWED, "cli", *LIBRARIES} - ALLOWED[package] - {package}
    for file in (ENGINE / package).rglob("*.py"):
        torchao = {"torchao"} if str(file.relative_to(ENGINE)) in FLOAT8 else set()
        torch = {"torch"} if package == "config" else set()
        assert not imported(file) & (forbidden - torchao | torch), file


@pytest.mark.parametrize("room", ROOMS)
def test_imports_of_the_proof_run_one_way(room):
    for file in (ENGINE / "proof" / room).rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        rooms = {path[2] for name in names if len(path := name.split(".")) > 2 and path[1] == "proof"}
        assert rooms & ROOMS.keys() <= ROOMS[room], file


@pytest.mark.parametrize("later", [False, True], ids=["at import", "later"])
def test_modules_do_not_import_each_other_in_a_cycle(later):
    """Plans import the registry for plans of mixers, and the registry imports the class of plans only for type checkers."""
    paths = {".".join(file.relative_to(ENGINE).with_suffix("").parts): file for file in ENGINE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): file for name, file in paths.items()}
    as_one = {"plan.registry": "plan.plan"} if later else {}
    graph = defaultdict(set)
    for name, file in modules.items():
        node = as_one.get(name, name)
        graph[node] |= {as_one.get(other, other) for other in modules_imported(file, modules, later)} - {node}
    TopologicalSorter(graph).prepare()  # its error names a cycle


def modules_imported(file: Path, modules: dict[str, Path], later: bool) -> set[str]:
    """Return the modules of titanplans that `file` imports.

    `later` includes imports in functions and under TYPE_CHECKING.
    """
    names, todo = set(), [ast.parse(file.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom):
            package = (node.module or "").removeprefix("titanplans").removeprefix(".")
            for alias in node.names:
                full = f"{package}.{alias.name}".removeprefix(".")
                names.add(full if full in modules else package)
        skipped = isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if later or not skipped:
            todo += ast.iter_child_nodes(node)
    return names & modules.keys()


@pytest.mark.parametrize("folder", ["plans", "models"])
def test_plans_and_models_import_titanplans_alone(folder):
    for file in (ROOT / folder).rglob("*.py"):
        engine = {path.name for path in ENGINE.iterdir() if path.is_dir()}
        assert not imported(file) & (engine | LIBRARIES), file


def test_the_engine_names_no_plan():
    for file in ENGINE.rglob("*.py"):
        assert "plans" not in imported(file), file


def test_tests_mirror_the_engine():
    """A folder of tests has the name of the package that it tests, and `make test` runs some of its tests."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    folders = {file.parent.relative_to(ROOT / "tests") for file in files}
    assert not [
        each
        for each in folders
        if not (ENGINE / each).is_dir() and not (ROOT / each).is_dir() and each.name != "cuda"
    ]
    quick = {file.parent.relative_to(ROOT / "tests") for file in files if not is_thorough(file)}
    assert quick == folders


def is_thorough(file: Path) -> bool:
    """Return whether the file's `pytestmark` marks all of its tests as thorough."""
    marks = [
        ast.unparse(node.value)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return any("pytest.mark.thorough" in each for each in marks)


def test_the_folders_plans_and_models_are_not_imported_by_these_names():
    for folder in ("plans", "models"):
        message = run_python("-c", f"import {folder}").stderr
        assert f"this folder is imported as titanplans.{folder}, not as {folder}" in message


def test_only_the_trainer_uses_what_torch_2_11_lacks():
    """tests/torch_2_11_lacks.txt lists the names that torch 2.11 lacks, because the installed release has them."""
    lacks = set((ROOT / "tests" / "torch_2_11_lacks.txt").read_text().splitlines())
    files = [file for folder in ("titanplans", "plans", "models") for file in (ROOT / folder).rglob("*.py")]
    uses = [
        f"{file.relative_to(ROOT)}: {used}"
        for file in files
        if "training" not in file.parts and "torch_private" not in file.parts
        for used in sorted(lacks & torch_names(ast.parse(file.read_text())))
    ]
    assert not uses


def torch_names(tree: ast.AST) -> set[str]:
    """Return the names of modules, members and arguments in a file, except members that the file looks up by string, too."""
    names: set[str] = set()
    looked_up = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names |= {ast.unparse(node)} | ({f".{node.attr}"} if node.attr not in looked_up else set())
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            names |= {f"{name}({keyword.arg})" for keyword in node.keywords}
    return names


def test_the_search_for_names_that_torch_2_11_lacks():
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
absent("torchtitan")  # which the loop alone needs
"""


def test_an_import_loads_no_more_than_it_needs():
    subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS], check=True, cwd=ROOT)


DECLARED = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
_MODULES = {
    "annotated-types": "annotated_types",
    "flash-linear-attention": "fla",
    "huggingface-hub": "huggingface_hub",
    "megatron-fsdp": "megatron_fsdp",
    "pydantic-core": "pydantic_core",
    "tomli-w": "tomli_w",
}
"""The package of each distribution whose name is not the package's name."""


def test_every_dependency_is_imported_and_every_import_is_a_dependency():
    extras = DECLARED["optional-dependencies"]
    parts = [
        DECLARED["dependencies"],
        *(extras[name] for name in ("train", "fla", "float8", "trainer", "wandb")),
    ]
    expected = {_MODULES.get(name, name) for part in parts for name in map(_distribution, part)}
    files = [f for p in ("titanplans", "plans", "models") for f in (ROOT / p).rglob("*.py")]
    ours = {path.stem for path in (ROOT / "titanplans").iterdir()} | {"titanplans", *_public()}
    used = set().union(*map(imported, files)) - set(sys.stdlib_module_names) - ours
    assert used == expected - {"tensorboard"}  # torch imports this


def test_each_library_of_an_extra_is_known_to_the_error_that_names_the_extra():
    extras = DECLARED["optional-dependencies"]
    declared = {
        (_MODULES.get(name, name), name, extra)
        for extra in ("train", "fla", "float8", "trainer", "wandb", "megatron-fsdp")
        for name in map(_distribution, extras[extra])
        if name != "torch"
    }
    assert {(package, *known) for package, known in EXTRAS.items()} == declared


LIBRARIES_INSIDE = {
    "torchtitan": ("training/", "integrations/torchtitan.py"),
    "accelerate": ("integrations/transformers.py",),
    "numpy": ("training/", "kernels/interpreted/"),
    "tokenizers": ("training/",),
    "xxhash": ("training/",),
    "triton": ("kernels/interpreted/", "loss/kernels.py"),
    "torchao": ("precision/float8/",),
}
"""The files that may import a library of an extra at their top. Elsewhere, functions that need the library import it."""


def test_the_light_install_imports_no_library_of_an_extra():
    for file in ENGINE.rglob("*.py"):
        path = file.relative_to(ENGINE).as_posix()
        for package in _imported_at_the_top(file) & EXTRAS.keys():
            assert path.startswith(LIBRARIES_INSIDE.get(package, ())), (path, package)


def _imported_at_the_top(file: Path) -> set[str]:
    nodes = ast.parse(file.read_text()).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def _distribution(requirement: str) -> str:
    return Requirement(requirement).name


def _public() -> list[str]:
    import titanplans

    return titanplans.__all__


def test_class_names_are_unique():
    """`Config` is excluded, because torchtitan needs a nested class of this name in each component."""
    files = [file for package in ("titanplans", "plans") for file in (ROOT / package).rglob("*.py")]
    trees = (ast.walk(ast.parse(file.read_text())) for file in files)
    names = Counter(node.name for tree in trees for node in tree if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and name != "Config"] == []
