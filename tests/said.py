"""Errors of calls, which are one line, and the output of programs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titanplans.errors import UserError

ROOT = Path(__file__).parents[1]


def refusal(call: Callable[..., Any], *args: Any, kind: type[Exception] = UserError, **kwargs: Any) -> str:
    """Return the error of `call(*args, **kwargs)`, of the class `kind` and in one line."""
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def error_of(
    call: Callable[..., Any], *args: Any, kind: type[Exception] = UserError, **kwargs: Any
) -> str | None:
    """Return the error of `call(*args, **kwargs)`; None where there is none, as a rank that reports it."""
    try:
        call(*args, **kwargs)
    except kind as error:
        return str(error)
    return None


def python(
    *words: Any, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this Python with `words` in `cwd`; return its exit status and what it printed."""
    words = (sys.executable, *words)
    environment = os.environ | (env or {})
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
