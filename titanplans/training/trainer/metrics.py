"""`MetricsProcessor`: writes a log line per logged step, and the same metrics to TensorBoard, W&B and metrics.jsonl."""

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
from titanplans.disk import name_file_in_errors
from titanplans.errors import UserError
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.parallel.optimizers.load_balance import LoadBalancer
from titanplans.training.trainer.device import DeviceMemory, Peak
from titanplans.training.trainer.jsonl import FILE_NAME, JsonlWriter

_A100_PEAK_FLOPS = 312e12
"""The value that torchtitan's table returns for a device that it does not know."""


class MetricsProcessor:
    """Logs training and validation: log line, TensorBoard, W&B, metrics.jsonl. The trainer sets the attributes.

    A metric that is unknown is left out: MFU on a device whose peak is unknown, device memory on a CPU.

    Args:
        options: the options in [metrics].
        mesh: the meshes of the job's degrees.
        device: this rank's device.
        dump_folder: the job's dump folder.
        values: the job's options, for W&B.

    Attributes:
        total_steps: number of steps of the run, from which the remaining time is computed.
        num_flops_per_token: FLOPs of one forward and backward of the unsplit model.
        data_metrics: returns the data loader's metrics since the last call. Called on all ranks.
        balancer: balances the loads of experts, and has their metrics.
        validation_loss: the newest validation loss, in nats per token.
        ntokens_since_last_log: tokens in this rank's batches since the last log line.
        data_loading_times: seconds that loading each batch took, since the last log line.
        seconds_per_step: mean time of the steps of the newest log line; None while these include one of the first three,
            which compile, rebuild buckets or are recorded.
    """

    total_steps: int
    num_flops_per_token: int
    data_metrics: Callable[[], dict[str, float]]
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
        self.logger: Any = self._make_writers(values)
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.seconds_per_step: float | None = None
        self.time_last_log = time.perf_counter()
        self._first_step = 0
        self._peak_before_validation: Peak | None = None
        """Peak memory from the last log line to the validation that followed; None: no validation has run since the last
        log line."""
        self._time_first_log = 0.0
        self._last_logged_step = 0
        self.memory.reset()

    def should_log(self, step: int) -> bool:
        """Return whether `step` is the first of this run, a multiple of `log_freq`, or the last. Call this in every step."""
        self._first_step = self._first_step or step
        return step % self.options.log_freq == 0 or step in (1, self._first_step, self.total_steps)

    def log_model(self) -> None:
        """Log the memory that building the model took, and the peak FLOP/s that MFU refers to."""
        _, memory = self._memory(self._interval_peak())
        peak = "" if self.peak_flops is None else f"; MFU refers to a peak of {self.peak_flops:.3e} FLOP/s"
        name = f"{self.memory.name}, {self.memory.gib(self.memory.total):.2f} GiB"
        logger.info(f"The model is built: {memory} of {name}{peak}")

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
            step: the optimizer step, counted from 1.
            global_avg_loss: mean loss over all ranks, in nats per token.
            global_max_loss: the largest mean loss of a data-parallel rank, in nats per token.
            grad_norm: 2-norm of all gradients before clipping.
            extra_metrics: further scalars for the writers.
        """
        if math.isnan(global_max_loss):  # 0 / 0: a rank had only padding, in the last step of an epoch
            global_max_loss = global_avg_loss
        now = time.perf_counter()
        seconds = now - self.time_last_log
        if step == self._first_step:
            self._last_logged_step, self._time_first_log = step - 1, now

        seconds_per_step = seconds / (step - self._last_logged_step)
        if self._last_logged_step >= self._first_step + 2:
            self.seconds_per_step = seconds_per_step

        tokens_per_device = self.ntokens_since_last_log / (seconds * self.mesh.non_data_parallel_size)
        tokens = tokens_per_device * self.mesh.world_size
        tflops = self.num_flops_per_token * tokens_per_device / 1e12
        loading = sum(self.data_loading_times)
        memory, memory_text = self._memory(self._interval_peak())
        scalars = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "throughput(tps)": tokens_per_device,
            "throughput/all_devices(tps)": tokens,
            "tflops": tflops,
            "time_metrics/end_to_end(s)": seconds_per_step,
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
            (self.color.cyan, f"TFLOPS {_three_digits(tflops)}"),
        ]
        if self.peak_flops is not None:
            scalars["mfu(%)"] = mfu = 100 * tflops * 1e12 / self.peak_flops
            fields.append((self.color.magenta, f"MFU {mfu:.1f}%"))
        remaining = self._remaining_seconds(step, now)
        if remaining is not None:
            scalars["time_metrics/remaining(s)"] = remaining
            fields.append((self.color.white, f"left {format_seconds(remaining)}"))

        extra = {**(extra_metrics or {}), **self.data_metrics(), **self.balancer.metrics()}
        self._write_image(self.balancer.picture(), step)
        self._write(scalars | extra, step)
        self._print(fields)
        self._last_logged_step = step
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self._peak_before_validation = None
        self.memory.reset()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Log the validation loss of the model after `step`, in nats per token."""
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
        """Exclude time and tokens of the body from the training throughput, and measure its peak memory separately."""
        tokens, started = self.ntokens_since_last_log, time.perf_counter()
        self._peak_before_validation = self._interval_peak()
        self.memory.reset()
        yield
        self.memory.reset()
        self.ntokens_since_last_log = tokens
        self.time_last_log += time.perf_counter() - started

    def _write(self, scalars: dict[str, Any], step: int) -> None:
        with name_file_in_errors(self._folder):
            self.logger.log(scalars, step)

    def _write_image(self, image: torch.Tensor | None, step: int) -> None:
        # torchtitan's writers take only scalars, so TensorBoard's writer is called directly.
        if image is not None and self._tensorboard is not None:
            self._tensorboard.writer.add_image("experts/load", image, step)

    def _make_writers(self, values: dict[str, Any]) -> LoggerContainer:
        """Return the writers of this rank. Only rank 0 has any, or every rank with metrics.save_for_all_ranks."""
        writers, options, rank = LoggerContainer(), self.options, torch.distributed.get_rank()
        if rank != 0 and not options.save_for_all_ranks:
            return writers
        subfolder = f"rank_{rank}" if options.save_for_all_ranks else ""
        started = datetime.now().strftime("%Y%m%d-%H%M")
        folder = str(Path(self._folder, options.save_tb_folder, started, subfolder))
        if options.enable_wandb:
            writers.add_logger(_wandb(folder, values))
        if options.enable_tensorboard:
            self._tensorboard = TensorBoardLogger(folder)
            writers.add_logger(self._tensorboard)
        if options.enable_jsonl:
            path = Path(self._folder, subfolder, FILE_NAME)
            # `JsonlWriter` has the methods of torchtitan's `BaseLogger`, but is not a subclass.
            writers.add_logger(JsonlWriter(path))  # pyrefly: ignore[bad-argument-type]
        return writers

    def close(self) -> None:
        """Close the writers."""
        self.logger.close()

    def _interval_peak(self) -> Peak:
        """Return the peak memory since the last log line, validations excluded."""
        peak = self.memory.peak()
        if self._peak_before_validation is None:
            return peak
        return Peak(*map(max, peak, self._peak_before_validation))

    def _memory(self, peak: Peak) -> tuple[dict[str, float], str]:
        """Return peak memory as scalars and as text for the log line; on a CPU, the resident set of the process."""
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

    def _remaining_seconds(self, step: int, now: float) -> float | None:
        """Estimate the time to `total_steps` from all steps but the first, which may compile. Return None in the first
        step."""
        if step == self._first_step:
            return None
        return (now - self._time_first_log) / (step - self._first_step) * (self.total_steps - step)

    def _print(self, fields: list[tuple[str, str]]) -> None:
        logger.info("  ".join(f"{color}{text}{self.color.reset if color else ''}" for color, text in fields))


def _wandb(folder: str, values: dict[str, Any]) -> WandBLogger:
    import wandb  # `check_job` has refused the job if it is not installed

    try:
        return WandBLogger(folder, config_dict=values)
    except wandb.Error as error:
        raise UserError(
            f"[metrics] enable_wandb = true: W&B did not start ({error}): log in, set WANDB_MODE=offline, or disable it"
        ) from error


def known_peak_flops(memory: DeviceMemory) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s from torchtitan's table; None if it has no entry."""
    if memory.is_host:
        return None
    peak = get_peak_flops(memory.name)
    return None if peak == _A100_PEAK_FLOPS and "A100" not in memory.name else peak


def format_seconds(seconds: float) -> str:
    """Format a duration in its two largest units, rounded up to seconds: "8s", "2m05s", "1h40m", "3d04h"."""
    minutes, s = divmod(math.ceil(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{hours}h{m:02}m"
    return f"{minutes}m{s:02}s" if minutes else f"{s}s"


def _three_digits(value: float) -> str:
    """Format a number with three significant digits and no exponent: 0.00456, 12.3, 456."""
    digits = max(0, 2 - math.floor(math.log10(value))) if 0 < value < 100 else 0
    return f"{value:,.{digits}f}"
