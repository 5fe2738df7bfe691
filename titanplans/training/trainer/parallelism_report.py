"""Write a job's parallelism report to `parallelism.json` in its dump folder, and log it.

`titanplans.parallel.report` defines its contents; `titanplans.training.pipeline.report` adds the pipeline and draws it.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titanplans.config import rename_option_errors
from titanplans.disk import write_atomically
from titanplans.observe.summary import after_step, at_start, pipeline_after_step
from titanplans.parallel import DDPConfig, FSDP2Config
from titanplans.parallel.report import ParallelismReport

if TYPE_CHECKING:
    from titanplans.training.pipeline.report import PipelineReport

FILE = "parallelism.json"

_log = logging.getLogger(__name__)


class JobReport:
    """Writes and logs the report of one run: the applied parallelism at the start, and later the measurements of a step.

    Args:
        model: the parallelised and initialised model; with a pipeline, the first stage of this rank.
        mesh: a `Mesh`.
        config: the strategy that was applied.
        dump_folder: the folder in which rank 0 writes the report.
        micro_batches: forward and backward passes per step (accumulated batches x the pipeline's micro batches).
        measure: whether to measure one of the first steps.
        pipeline: the pipeline's report; None without a pipeline.

    Raises:
        ConfigError: a block that should be compiled is not.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: Any,
        config: FSDP2Config | DDPConfig,
        dump_folder: str,
        micro_batches: int,
        measure: bool,
        pipeline: "PipelineReport | None" = None,
    ):
        with rename_option_errors():
            self.report = ParallelismReport(model, mesh, config)
        if pipeline is not None:
            self.report.values["pipeline"] = pipeline.values
        self._pipeline = pipeline
        self.report.values["micro_batches"] = micro_batches
        self.file = Path(dump_folder) / FILE
        # Each measured step replaces the previous one in the report. With DDP two steps are measured: after the first step
        # the reducer rebuilds its buckets in the order in which gradients arrived. With a pipeline two steps are measured,
        # since the first one runs an additional forward that infers the shapes that stages receive; a third step is timed.
        steps = 3 if pipeline is not None else 2 if isinstance(config, DDPConfig) else 1
        self.steps_to_measure = steps if measure else 0
        if not measure:
            self.report.not_measured("metrics.measure_first_step = false")

    def start(self) -> None:
        """Write and log what is known before the first step."""
        self._write()
        timeline_lines = [] if self._pipeline is None else self._pipeline.text()
        for line in [*at_start(self.report.values), *timeline_lines]:
            _log.info(line)

    @contextmanager
    def measuring(self, step: int) -> Iterator[Callable[[], None]]:
        """Measure the training step in the body, if it is one of the first steps.

        Yields:
            A function that the body calls before it logs: later collectives are attributed to the log.

        Raises:
            ConfigError: a block that should be compiled ran eagerly.
        """
        if not self.steps_to_measure:
            yield _do_nothing
            return
        self.steps_to_measure -= 1
        if self._pipeline is not None and not self.steps_to_measure:
            # The timed step runs without the recorder, which slows operators down.
            with self._pipeline.measuring(step):
                yield _do_nothing
            lines = pipeline_after_step(self.report.values)
        else:
            graphs = self.report.values["graphs"]
            with rename_option_errors(), self.report.measuring(step) as record:
                yield record.places.log_begins
            if self._pipeline is not None and graphs is not None:
                self.report.values["graphs"] = (
                    graphs  # the graphs of the first step, since later steps compile nothing
                )
            # The step before the timed one is the last that is recorded.
            last = self.steps_to_measure == (0 if self._pipeline is None else 1)
            lines = after_step(self.report.values) if last else []
        self._write()
        for line in lines:
            _log.info(line)

    def _write(self) -> None:
        if dist.get_rank() != 0:
            return
        write_atomically(self.file, json.dumps(self.report.values, indent=1) + "\n")
        if self._pipeline is not None:
            self._pipeline.draw()


def _do_nothing() -> None:
    """Stand in for the function that marks the start of logging, in a step that is not recorded."""
