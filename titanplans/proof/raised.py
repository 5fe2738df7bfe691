"""Where an error of a model was raised: in its own code, or in ours."""

import traceback


def _modules(error: Exception) -> list[tuple[str, int]]:
    """Return the Python modules through which `error` came, the outermost first, each with its line.

    Those of torch and of the proof, which stand around every call, are left out.
    """
    found = [
        (frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return [
        (name, line)
        for name, line in found
        if name.partition(".")[0] != "torch" and not name.startswith("titanplans.proof.")
    ]


def is_ours(error: Exception) -> bool:
    """Whether `error` came through code of this project, such as a kernel's stand-in."""
    return any(name.startswith("titanplans.") for name, _ in _modules(error))


def raised_at(error: Exception) -> str:
    """Return the Python module and line that raised `error`, or that called torch, which did."""
    name, line = (_modules(error) or [("torch", 0)])[-1]
    return f"{name}:{line}"
