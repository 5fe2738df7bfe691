"""Write and read metrics.jsonl (`metrics.enable_jsonl`), which has one line of JSON per logged step or validation.

`titanplans.training.trainer.metrics` defines the metrics. They have the same names in TensorBoard and W&B.
"""

import json
import math
from pathlib import Path
from typing import Any, TextIO

from titanplans.disk import name_file_in_errors
from titanplans.errors import ConfigError

FILE_NAME = "metrics.jsonl"


class JsonlWriter:
    """Appends one JSON object to a file per call of `log`. The class has the methods of torchtitan's writers.

    If the first call is for step N, the lines of an earlier run from step N on are removed, so the file describes one run.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: TextIO | None = None

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write `{"step": step, **metrics}`. A value that is not finite becomes null, since JSON can't express it."""
        record = {"step": step, **{name: _finite_or_none(value) for name, value in metrics.items()}}
        with name_file_in_errors(self.path):
            if self._file is None:
                self._file = _open_from(self.path, step)
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()  # so that a killed run keeps its lines

    def close(self) -> None:
        """Close the file; another call of `log` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a metrics file, in order. An incomplete last line, which a killed job leaves, is skipped.

    Raises:
        ConfigError: a line is not an object with a step; the message names the line.
    """
    records = []
    with path.open("rb") as file:
        for line_number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # not JSON, or not UTF-8
                record = None
            if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
                raise ConfigError(
                    f"{path}, line {line_number} holds no metrics (a JSON object with a step); remove the line, or "
                    "move the file away"
                )
            records.append(record)
    return records


def _open_from(path: Path, step: int) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = [record for record in read_metrics(path) if record["step"] < step] if path.exists() else []
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(json.dumps(record) + "\n" for record in earlier), encoding="utf-8")
    rewritten.replace(path)
    return path.open("a", encoding="utf-8")


def _finite_or_none(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
