"""What took effect, written and logged: at start what was done to the model, after a step what it did.

What is found out, and how, is `observe.effect`'s. The file is `parallelism.json` in the job's dump folder, of rank 0.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanplans.config import by_job_key
from titanplans.observe.effect import Effect
from titanplans.observe.effect_words import after_step, at_start
from titanplans.parallel import DDPConfig, FSDP2Config

FILE = "parallelism.json"
_WIDTH = 130

_log = logging.getLogger(__name__)


class EffectReport:
    """Writes and logs the report of one run.

    Args:
        model: parallelised, with its values.
        mesh: torchtitan's ParallelDims.
        config: the strategy by which it was.
        dump_folder: the job's.
        micro_batches: of a step.

    Raises:
        ConfigError: what was to be compiled is not.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: Any,
        config: FSDP2Config | DDPConfig,
        dump_folder: str,
        micro_batches: int,
    ):
        with by_job_key():
            self.effect = Effect(model, mesh, config)
        self.effect.report["micro_batches"] = micro_batches
        self.file = Path(dump_folder) / FILE
        # After the first step DDP's reducer sorts its buckets anew, by the order in which gradients came.
        self._steps = 2 if isinstance(config, DDPConfig) else 1

    def start(self) -> None:
        """Write and log what is known before the first step."""
        self._write()
        for line in at_start(self.effect.report):
            _log.info(line)

    @contextmanager
    def of_step(self, step: int, schedulers: Any) -> Iterator[None]:
        """Measure the training step that runs inside, if it is one to measure.

        Args:
            step: its number.
            schedulers: torchtitan's container of them, whose step ends what every training step does; what
                comes after is for the log.

        Raises:
            ConfigError: a block that was to be compiled ran eagerly.
        """
        if not self._steps:
            yield
            return
        self._steps -= 1
        with (
            by_job_key(),
            self.effect.measuring(step) as record,
            _after(schedulers, "step", record.places.log_begins),
        ):
            yield
        self._write()
        if not self._steps:
            for line in after_step(self.effect.report):
                _log.info(line)

    def _write(self) -> None:
        if dist.get_rank() != 0:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: a sweep may read it while the job runs.
        part = self.file.with_suffix(".part")
        part.write_text(f"{_json(self.effect.report)}\n")
        os.replace(part, self.file)


def _json(value: Any, margin: str = "") -> str:
    """JSON in which what fits stands on one line."""
    line = json.dumps(value)
    inner = f"{margin}  "
    if not value or not isinstance(value, dict | list) or len(margin) + len(line) <= _WIDTH:
        return line
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_json(held, inner)}" for key, held in value.items()]
    else:
        items = [_json(held, inner) for held in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{inner}" + f",\n{inner}".join(items) + f"\n{margin}{last}"


@contextmanager
def _after(owner: Any, method: str, call: Callable[[], None]) -> Iterator[None]:
    """Let `call` follow each call of the method of `owner`."""
    own = getattr(owner, method)

    def followed(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        call()
        return result

    setattr(owner, method, followed)
    try:
        yield
    finally:
        delattr(owner, method)
