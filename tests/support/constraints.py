"""Whether a constraints file has a version of each package that pyproject.toml asks for; one line says what is stale.

python tests/support/constraints.py constraints.txt        # make check, and before anything is installed
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def stale(project: str, constraints: str) -> str | None:
    """Return the requirement of a pyproject.toml (a text) that `constraints` (a text) lacks; None if it lacks none."""
    pinned: dict[str, list[Requirement]] = {}
    for line in constraints.splitlines():
        if line.partition("#")[0].strip():
            pin = Requirement(line)
            pinned.setdefault(canonicalize_name(pin.name), []).append(pin)
    found = tomllib.loads(project)
    asked = [*found["project"]["dependencies"], *found["build-system"]["requires"]]
    for extra in found["project"]["optional-dependencies"].values():
        asked += extra
    for wanted in map(Requirement, asked):
        pins = pinned.get(canonicalize_name(wanted.name), [])
        if not pins:
            return f"it has no {wanted.name}"
        for pin in pins:  # several where versions of Python need several
            version = str(pin.specifier).removeprefix("==")
            if not wanted.specifier.contains(version, prereleases=True):
                return f"it has {wanted.name} {version}, and pyproject.toml asks for {wanted.specifier}"
    return None


if __name__ == "__main__":
    why = stale(PROJECT.read_text(), Path(sys.argv[1]).read_text())
    if why is not None:
        sys.exit(f"{sys.argv[1]} is stale: {why}; make lock renews it")
