"""A run's log: a line for each logged step, and the same figures for TensorBoard, W&B and metrics.jsonl.

The sinks are torchtitan's. Unknown figures are left out: MFU on a device without a published peak, device memory on a CPU.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger, WandBLogger
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import Color, NoColor, get_peak_flops

from titanplans.config.sections.run import Metrics
from titanplans.disk import naming
from titanplans.errors import UserError
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.parallel.optimizers.load_balance import LoadBalancer
from titanplans.training.trainer.device import DeviceMemory, Peak
from titanplans.training.trainer.jsonl import FILE_NAME, JsonlWriter

_A100_PEAK_FLOPS = 312e12


class MetricsProcessor:
    """Log line, TensorBoard, W&B and metrics.jsonl. The trainer sets the attributes.

    Args:
        options: [metrics].
        values: the job's, for W&B.

    Attributes:
        total_steps: of the run, by which the time left is shown.
        num_flops_per_token: of a forward and a backward of the whole model.
        of_data: the data loader's metrics of a logged interval; called on all ranks.
        balancer: of the routers' loads.
        validation_loss: the newest.
        ntokens_since_last_log: of this rank's batches.
        data_loading_times: seconds, of each batch since the last line.
    """

    total_steps: int
    num_flops_per_token: int
    of_data: Callable[[], dict[str, float]]
    balancer: LoadBalancer
    validation_loss: float

    def __init__(
        self, options: Metrics, mesh: Mesh, device: torch.device, *, dump_folder: str, values: dict[str, Any]
    ):
        self.options, self.mesh, self._folder = options, mesh, dump_folder
        self.memory = DeviceMemory(device)
        has_colors = (
            sys.stdout.isatty() and "NO_COLOR" not in os.environ and not options.disable_color_printing
        )
        self.color = Color() if has_colors else NoColor()
        self.peak_flops = known_peak_flops(self.memory)
        self._tensorboard: TensorBoardLogger | None = None
        self.logger: Any = self._sinks(values)
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.time_last_log = time.perf_counter()
        self._first_step = 0
        self._peak: Peak | None = None
        """The memory's, of the logged interval before its last validation."""
        self._time_first_log = 0.0
        self._last_step = 0  # that was logged
        self.memory.reset()

    def should_log(self, step: int) -> bool:
        """The first step of this run, every `log_freq`-th, and the last."""
        self._first_step = self._first_step or step
        return step % self.options.log_freq == 0 or step in (1, self._first_step, self.total_steps)

    def log_model(self) -> None:
        """Log the memory that the model takes, and the peak against which MFU is computed."""
        _, memory = self._memory(self._peak_so_far())
        peak = "" if self.peak_flops is None else f"; MFU is of {self.peak_flops:.3e} FLOP/s"
        name = f"{self.memory.name}, {self.memory.gib(self.memory.total):.2f} GiB"
        logger.info(f"The model is made: {memory} of {name}{peak}")

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one training step.

        Args:
            step: the optimiser step, from 1.
            global_avg_loss: nats per token, over all ranks.
            global_max_loss: the largest of the ranks' mean losses.
            grad_norm: 2-norm of all gradients before clipping.
            extra_metrics: more scalars for the writers.
        """
        if math.isnan(global_max_loss):  # a rank had only padding in the last step of an epoch
            global_max_loss = global_avg_loss
        now = time.perf_counter()
        seconds = now - self.time_last_log
        if step == self._first_step:
            self._last_step, self._time_first_log = step - 1, now

        tokens_per_device = self.ntokens_since_last_log / (seconds * self.mesh.non_data_parallel_size)
        tokens = tokens_per_device * self.mesh.world_size
        tflops = self.num_flops_per_token * tokens_per_device / 1e12
        loading = sum(self.data_loading_times)
        memory, memory_text = self._memory(self._peak_so_far())
        scalars = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "throughput(tps)": tokens_per_device,
            "throughput/all_devices(tps)": tokens,
            "tflops": tflops,
            "time_metrics/end_to_end(s)": seconds / (step - self._last_step),
            "time_metrics/data_loading(s)": loading / len(self.data_loading_times),
            "time_metrics/data_loading(%)": 100 * loading / seconds,
            **memory,
        }
        fields = [
            (self.color.red, f"step {step:>{len(str(self.total_steps))}}"),
            (self.color.green, f"loss {global_avg_loss:8.5f}"),
            (self.color.orange, f"grad_norm {grad_norm:7.4f}"),
            (self.color.turquoise, memory_text),
            (self.color.blue, f"tokens/s {tokens:,.0f}"),
            (self.color.cyan, f"TFLOPS {_significant(tflops)}"),
        ]
        if self.peak_flops is not None:
            scalars["mfu(%)"] = mfu = 100 * tflops * 1e12 / self.peak_flops
            fields.append((self.color.magenta, f"MFU {mfu:.1f}%"))
        left = self._seconds_left(step, now)
        if left is not None:
            scalars["time_metrics/left(s)"] = left
            fields.append((self.color.white, f"left {format_seconds(left)}"))

        extra = {**(extra_metrics or {}), **self.of_data(), **self.balancer.figures()}
        self._show(self.balancer.picture(), step)
        self._write(scalars | extra, step)
        self._print(fields)
        self._last_step = step
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self._peak = None
        self.memory.reset()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Log the validation loss, in nats per token, of the model after `step`."""
        self.validation_loss = loss
        memory, memory_text = self._memory(self.memory.peak())
        scalars = {"validation_metrics/loss": loss}
        scalars |= {f"validation_metrics/{name}": value for name, value in memory.items()}
        self._write(scalars | (extra_metrics or {}), step)
        self._print(
            [
                (self.color.yellow, f"step {step:>{len(str(self.total_steps))}}"),
                (self.color.green, f"validation loss {loss:8.5f}"),
                (self.color.turquoise, memory_text),
            ]
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the enclosed time and tokens out of the throughput of training, and measure its memory apart."""
        tokens, started = self.ntokens_since_last_log, time.perf_counter()
        self._peak = self._peak_so_far()
        self.memory.reset()
        yield
        self.memory.reset()
        self.ntokens_since_last_log = tokens
        self.time_last_log += time.perf_counter() - started

    def _write(self, scalars: dict[str, Any], step: int) -> None:
        with naming(self._folder):
            self.logger.log(scalars, step)

    def _show(self, picture: torch.Tensor | None, step: int) -> None:
        """Give TensorBoard the picture of the experts' loads, if it is on."""
        if picture is not None and self._tensorboard is not None:
            self._tensorboard.writer.add_image("experts/load", picture, step)

    def _sinks(self, values: dict[str, Any]) -> LoggerContainer:
        """Return where the figures go. Every rank knows them: rank 0 writes them, or each its own."""
        sinks, options, rank = LoggerContainer(), self.options, torch.distributed.get_rank()
        if rank != 0 and not options.save_for_all_ranks:
            return sinks
        own = f"rank_{rank}" if options.save_for_all_ranks else ""
        folder = str(Path(self._folder, options.save_tb_folder, datetime.now().strftime("%Y%m%d-%H%M"), own))
        if options.enable_wandb:
            sinks.add_logger(_wandb(folder, values))
        if options.enable_tensorboard:
            self._tensorboard = TensorBoardLogger(folder)
            sinks.add_logger(self._tensorboard)
        if options.enable_jsonl:
            path = Path(self._folder, own, FILE_NAME)
            sinks.add_logger(JsonlWriter(path))  # pyrefly: ignore[bad-argument-type]  it is shaped as one
        return sinks

    def close(self) -> None:
        """Close the sinks."""
        self.logger.close()

    def _peak_so_far(self) -> Peak:
        """Return the peak of the interval since the last log, without validations."""
        now = self.memory.peak()
        return now if self._peak is None else Peak(*map(max, now, self._peak))

    def _memory(self, peak: Peak) -> tuple[dict[str, float], str]:
        """Return peak memory, as scalars and for the line; on a CPU the process's."""
        memory = self.memory
        reserved, percent = memory.gib(peak.reserved), memory.percent(peak.reserved)
        if memory.is_host:
            scalars = {"memory/peak_rss(GiB)": reserved, "memory/peak_rss(%)": percent}
            return scalars, f"RSS {reserved:.2f} GiB"
        return {
            "memory/max_active(GiB)": memory.gib(peak.active),
            "memory/max_active(%)": memory.percent(peak.active),
            "memory/max_reserved(GiB)": reserved,
            "memory/max_reserved(%)": percent,
            "memory/num_alloc_retries": peak.retries,
            "memory/num_ooms": peak.out_of_memory,
        }, f"memory {reserved:.2f} GiB ({percent:.0f}%)"

    def _seconds_left(self, step: int, now: float) -> float | None:
        """Time to `total_steps` at the pace since the end of the first step, which may have compiled; None in it."""
        if step == self._first_step:
            return None
        return (now - self._time_first_log) / (step - self._first_step) * (self.total_steps - step)

    def _print(self, fields: list[tuple[str, str]]) -> None:
        logger.info("  ".join(f"{color}{text}{self.color.reset if color else ''}" for color, text in fields))


def _wandb(folder: str, values: dict[str, Any]) -> WandBLogger:
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "[metrics] enable_wandb = true: W&B is not installed: pip install wandb, or disable it"
        ) from error
    try:
        return WandBLogger(folder, config_dict=values)
    except wandb.Error as error:
        raise UserError(
            f"[metrics] enable_wandb = true: W&B did not start ({error}): log in, set WANDB_MODE=offline, or disable it"
        ) from error


def known_peak_flops(memory: DeviceMemory) -> float | None:
    """Return the dense bfloat16 peak in FLOP/s that torchtitan's table has of a device; None where it has no entry.

    For a name that it does not know, torchtitan answers with the A100's figure.
    """
    if memory.is_host:
        return None
    peak = get_peak_flops(memory.name)
    return None if peak == _A100_PEAK_FLOPS and "A100" not in memory.name else peak


def format_seconds(seconds: float) -> str:
    """A duration in its two largest units: "8s", "2m05s", "1h40m", "3d04h"."""
    whole = math.ceil(seconds)
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{hours}h{m:02}m"
    return f"{minutes}m{s:02}s" if minutes else f"{s}s"


def _significant(value: float) -> str:
    """Three significant digits, never an exponent: 0.00456, 12.3, 456."""
    digits = max(0, 2 - math.floor(math.log10(value))) if 0 < value < 100 else 0
    return f"{value:,.{digits}f}"
