"""Check that a constraints file pins a permitted version of each package that pyproject.toml requires.

python tests/support/constraints.py constraints.txt        # `make check` runs this
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def stale(project: str, constraints: str) -> str | None:
    """Return which requirement of a pyproject.toml a constraints file violates; None if it violates none.

    Args:
        project: the text of the pyproject.toml.
        constraints: the text of the constraints file.
    """
    pinned: dict[str, list[Requirement]] = {}
    for line in constraints.splitlines():
        if line.partition("#")[0].strip():
            pin = Requirement(line)
            pinned.setdefault(canonicalize_name(pin.name), []).append(pin)
    table = tomllib.loads(project)
    texts = [*table["project"]["dependencies"], *table["build-system"]["requires"]]
    for extra in table["project"]["optional-dependencies"].values():
        texts += extra
    own_name = table["project"].get("name")
    for requirement in map(Requirement, texts):
        if requirement.name == own_name:
            continue  # titanplans itself, in an extra that includes other extras
        pins = pinned.get(canonicalize_name(requirement.name), [])
        if not pins:
            return f"it has no {requirement.name}"
        for pin in pins:  # there are several if they depend on the version of Python
            version = str(pin.specifier).removeprefix("==")
            if not requirement.specifier.contains(version, prereleases=True):
                return f"it has {requirement.name} {version}, and pyproject.toml asks for {requirement.specifier}"
    return None


if __name__ == "__main__":
    reason = stale(PROJECT.read_text(), Path(sys.argv[1]).read_text())
    if reason is not None:
        sys.exit(f"{sys.argv[1]} is stale: {reason}; make lock renews it")
