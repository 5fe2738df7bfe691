"""Whether the model's own code raised an error, or ours."""

import traceback

from torch import nn

from titanplans.errors import ParallelError, PlanError, UserError


def _modules(error: Exception) -> list[tuple[str, int]]:
    """Return the Python modules through which `error` came, the outermost first, each with its line.

    Torch and the proof, which surround every call, are left out.
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
    """Whether `error` came through code of this project, such as a CPU kernel."""
    return any(name.startswith("titanplans.") for name, _ in _modules(error))


def raised_at(error: Exception) -> str:
    """Return the Python module and line that raised `error`, or that called torch, if torch did."""
    name, line = (_modules(error) or [("torch", 0)])[-1]
    return f"{name}:{line}"


def first_line(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"


def does_not_run(model: nn.Module, error: Exception, place: str) -> PlanError:
    """Return the error that reports the `error` of the whole `model`, its line, and the `place` in the training.

    A `ParallelError`, a refusal of the model as it was built, says all of that.
    """
    if isinstance(error, ParallelError):
        return PlanError(str(error))
    device = next(model.parameters()).device.type
    failed = f"{type(model).__name__}, unsplit, does not run on {device}: {first_line(error)} ({raised_at(error)}, {place})"
    if isinstance(error, UserError):
        return PlanError(failed)
    return PlanError(
        f"{failed}; if its kernels need a GPU, prove it there under torchrun (ranks='process_group', or --process-group)"
    )
