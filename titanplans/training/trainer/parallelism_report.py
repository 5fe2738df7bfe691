"""Write and log a job's parallelism report: the applied parallelism at the start, the measured one after a step.

Rank 0 writes it to `parallelism.json` in the job's dump folder. `titanplans.parallel.report` says what it contains;
`titanplans.training.pipeline.report` describes the pipeline in it, and draws the pictures that lie next to it.
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
from titanplans.disk import write_whole
from titanplans.observe.summary import after_step, at_start, pipeline_after_step
from titanplans.parallel import DDPConfig, FSDP2Config
from titanplans.parallel.report import ParallelismReport

if TYPE_CHECKING:
    from titanplans.training.pipeline.report import PipelineReport

FILE = "parallelism.json"

_log = logging.getLogger(__name__)


class JobReport:
    """Writes and logs the report of one run; `model` is parallelised and initialised, `mesh` a `Mesh`.

    Raises:
        ConfigError: a component of [compile] was not compiled.
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
        # After the first step DDP's reducer sorts its buckets anew, by the order in which gradients came. In the first step
        # of a pipeline stages also learn the shapes that they receive, by a forward more; its third step is timed.
        steps = 3 if pipeline is not None else 2 if isinstance(config, DDPConfig) else 1
        self.steps_to_measure = steps if measure else 0
        if not measure:
            self.report.not_measured("metrics.measure_first_step = false")

    def start(self) -> None:
        """Write and log the part that is known before the first step."""
        self._write()
        drawn = [] if self._pipeline is None else self._pipeline.text()
        for line in [*at_start(self.report.values), *drawn]:
            _log.info(line)

    @contextmanager
    def measuring(self, step: int) -> Iterator[Callable[[], None]]:
        """Measure the training step that runs inside, if it is one of the first; yield what it calls as its log begins.

        Raises:
            ConfigError: a block that was to be compiled ran eagerly.
        """
        if not self.steps_to_measure:
            yield _nothing
            return
        self.steps_to_measure -= 1
        if self._pipeline is not None and not self.steps_to_measure:
            # Without the recorder, which makes operators slower.
            with self._pipeline.measuring(step):
                yield _nothing
            lines = pipeline_after_step(self.report.values)
        else:
            graphs = self.report.values["graphs"]
            with rename_option_errors(), self.report.measuring(step) as record:
                yield record.places.log_begins
            if self._pipeline is not None and graphs is not None:
                self.report.values["graphs"] = graphs  # of the first step: later ones compile nothing
            last = self.steps_to_measure == (0 if self._pipeline is None else 1)
            lines = after_step(self.report.values) if last else []
        self._write()
        for line in lines:
            _log.info(line)

    def _write(self) -> None:
        if dist.get_rank() != 0:
            return
        write_whole(self.file, json.dumps(self.report.values, indent=1) + "\n")
        if self._pipeline is not None:
            self._pipeline.draw()


def _nothing() -> None:
    """Called in a step of which nothing is recorded."""
