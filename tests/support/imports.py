"""Imports of the engine's packages, read from their source files."""

import ast
from pathlib import Path

from tests.support.paths import ROOT

ENGINE = ROOT / "titanplans"


def imported(file: Path) -> set[str]:
    """Return the top-level packages that `file` imports. Packages of titanplans are named without the prefix
    "titanplans.", e.g. "split"."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
            if node.module == "titanplans":
                modules = [f"titanplans.{alias.name}" for alias in node.names]
        for module in modules:
            top, _, below = module.partition(".")
            names.add(below.partition(".")[0] if top == "titanplans" and below else top)
    return names


def package_imports() -> dict[str, set[str]]:
    """Return, for each package of the engine, which other packages it imports. `plans` and `models` are not in the
    engine."""
    packages = {path.parent.name for path in ENGINE.glob("*/__init__.py") if not path.parent.is_symlink()}
    return {
        name: {other for file in (ENGINE / name).rglob("*.py") for other in imported(file)}
        & packages - {name}
        for name in sorted(packages)
    }
