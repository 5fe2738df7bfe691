"""Run a program to its end."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT


def run_python(
    *arguments: Any, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this Python with `arguments` in `cwd`; return its exit status and what it printed."""
    return subprocess.run(
        (sys.executable, *arguments),
        cwd=cwd,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
