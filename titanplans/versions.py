"""Report the versions of the libraries that a run depends on, and the versions that were not tested.

The lowest and the highest version of each range in pyproject.toml are tested (CONTRIBUTING.md); every version in the
range counts as tested.
"""

import traceback
from collections.abc import Iterator
from importlib import metadata

from titanplans.errors import RunError, UserError

_DISTRIBUTIONS = {name: name for name in ("torch", "torchtitan", "torchao", "transformers")} | {
    "fla": "flash-linear-attention"
}
"""The name of a library's package -> the name of its distribution, for pip."""


def versions() -> str:
    """Return the versions of all libraries on one line; for a version that was not tested, also the range of tested
    versions."""
    items = [f"titanplans {_installed_version('titanplans') or 'of no known version'}"]
    for name in _DISTRIBUTIONS.values():
        tested = _missed_range(name)
        items.append(
            f"{name} {_installed_version(name) or 'of no known version'}{f' (tested: {tested})' if tested else ''}"
        )
    return ", ".join(items)


def library_versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of libraries by the names of their packages ("fla"); None if one is not installed."""
    return {package: _installed_version(_DISTRIBUTIONS[package]) for package in packages}


def describe_untested(error: BaseException) -> str:
    """Return the libraries in an error's traceback whose version was not tested, in parentheses; "" if there are none."""
    names = dict.fromkeys(
        _DISTRIBUTIONS[package] for package in _packages(error) if package in _DISTRIBUTIONS
    )
    phrases = [
        f"{name} {_installed_version(name)} was not tested, {tested} was"
        for name in names
        if (tested := _missed_range(name))
    ]
    return f" ({'; '.join(phrases)})" if phrases else ""


def _missed_range(name: str) -> str:
    """Return the range of tested versions of a library if the installed one is outside of it; else ""."""
    # Imported here, since most commands never need it.
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in metadata.requires("titanplans") or ()]
    except metadata.PackageNotFoundError:
        return ""  # titanplans runs from its folder, without being installed
    # torch has a second, narrower range for training, later in the list: `no_trainer` checks that range.
    tested = next((item.specifier for item in requirements if item.name == name), None)
    version = _installed_version(name)
    if tested is None or version is None or tested.contains(version, prereleases=True):
        return ""
    return str(tested)


def _installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if pip does not know it, as for a clone on PYTHONPATH."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _packages(error: BaseException | None) -> Iterator[str]:
    """Yield the packages in the tracebacks of an error and of its causes."""
    seen: set[int] = set()  # an error that is raised again may be among its own causes
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ImportError) and error.name:
            yield error.name.partition(".")[0]
        # An error for the user is raised on purpose: the packages in its traceback did not cause it.
        if not isinstance(error, UserError | RunError):
            for frame, _ in traceback.walk_tb(error.__traceback__):
                yield frame.f_globals.get("__name__", "").partition(".")[0]
        error = error.__cause__ or error.__context__
