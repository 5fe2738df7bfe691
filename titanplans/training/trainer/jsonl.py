"""`[metrics] enable_jsonl`: the figures of each logged step as a line of JSON, and how such a file is read.

`titanplans.training.trainer.metrics` defines the figures; they have the names that TensorBoard and W&B are given.
"""

import json
import math
from pathlib import Path
from typing import Any, TextIO

from titanplans.disk import naming
from titanplans.errors import ConfigError

FILE_NAME = "metrics.jsonl"


class JsonlWriter:
    """Appends to a file one object a call of `log`; shaped as torchtitan's writers are.

    A run that resumes at step N, or starts over, first drops the lines of an earlier run from step N on, so that
    what is read is one run.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: TextIO | None = None

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write `{"step": step, **metrics}`; a figure that is not finite, which JSON has no word for, is null."""
        row = {"step": step, **{name: _number(value) for name, value in metrics.items()}}
        with naming(self.path):
            if self._file is None:
                self._file = _open_from(self.path, step)
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()  # a killed run keeps its rows

    def close(self) -> None:
        """Close the file; `log` would open it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of such a file, in its order; a last line that was cut off by a kill is left out.

    Raises:
        ConfigError: a line is not such an object; names it.
    """
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # not JSON, or not UTF-8
                row = None
            if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                raise ConfigError(
                    f"{path}, line {number} is not a row of metrics (an object with a step); remove the line, or "
                    "move the file away"
                )
            rows.append(row)
    return rows


def _open_from(path: Path, step: int) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = [row for row in read_rows(path) if row["step"] < step] if path.exists() else []
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(json.dumps(row) + "\n" for row in earlier), encoding="utf-8")
    rewritten.replace(path)
    return path.open("a", encoding="utf-8")


def _number(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
