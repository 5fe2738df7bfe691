"""The libraries whose versions decide what a run does, and which of them have one that was not tested.

Tested are both ends of each range that the installed package asks for (CONTRIBUTING.md), those in pyproject.toml.
"""

import traceback
from collections.abc import Iterator
from importlib import metadata

from titanplans.errors import RunError, UserError

_BELOW = {name: name for name in ("torch", "torchtitan", "torchao", "transformers")} | {
    "fla": "flash-linear-attention"
}
"""Of each library, as it is imported, the name by which pip knows it."""


def versions() -> str:
    """Return the versions on one line, each that was not tested with what was."""
    shown = [f"titanplans {_installed('titanplans') or 'of no known version'}"]
    for name in _BELOW.values():
        tested = _untested(name)
        shown.append(
            f"{name} {_installed(name) or 'of no known version'}{f' (tested: {tested})' if tested else ''}"
        )
    return ", ".join(shown)


def blamed(error: BaseException) -> str:
    """Return what a line about `error` ends with: the libraries that it came from whose version was not tested."""
    found = dict.fromkeys(_BELOW[package] for package in _packages(error) if package in _BELOW)
    words = [
        f"{name} {_installed(name)} was not tested, {tested} was"
        for name in found
        if (tested := _untested(name))
    ]
    return f" ({'; '.join(words)})" if words else ""


def _untested(name: str) -> str:
    """Return the tested versions of a library that has another one; "" if it has one of them."""
    # Not at the top: a refusal in a job, or --help, asks for no version.
    from packaging.requirements import Requirement

    try:
        asked = [Requirement(line) for line in metadata.requires("titanplans") or ()]
    except metadata.PackageNotFoundError:
        return ""  # run from its folder alone, which asks for nothing
    ranges = [one.specifier for one in asked if one.name == name and one.marker is None]
    version = _installed(name)
    within = (version is None or each.contains(version, prereleases=True) for each in ranges)
    return "" if all(within) else str(ranges[0])


def _installed(name: str) -> str | None:
    """Return the version of a library; None where pip does not know it, as a clone on PYTHONPATH."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _packages(error: BaseException | None) -> Iterator[str]:
    """Yield the packages through which an error came, and those that caused it; a refusal of ours came through none."""
    seen: set[int] = set()  # an error that was raised again may be among its own causes
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ImportError) and error.name:
            yield error.name.partition(".")[0]
        if not isinstance(error, UserError | RunError):
            for frame, _ in traceback.walk_tb(error.__traceback__):
                yield frame.f_globals.get("__name__", "").partition(".")[0]
        error = error.__cause__ or error.__context__
