"""Logged metrics: how numbers are formatted, known peak FLOPS, and measured memory."""

from types import SimpleNamespace

import pytest
import torch

from tests.support import process_groups
from titanplans.config.sections.run import Metrics
from titanplans.training.trainer.device import DeviceMemory, Peak
from titanplans.training.trainer.metrics import (
    MetricsProcessor,
    _three_digits,
    format_seconds,
    known_peak_flops,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (7.2, "8s"), (125, "2m05s"), (6000, "1h40m"), (3 * 86400 + 4 * 3600, "3d04h")],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.004562, "0.00456"), (12.34, "12.3"), (456.7, "457"), (0, "0")]
)
def test_three_significant_digits(value, text):
    assert _three_digits(value) == text


class Memory(DeviceMemory):
    """The memory of an accelerator, whose values a test sets."""

    used = highest = 0
    is_host, total = False, 100

    def __init__(self):
        pass

    def use(self, size):
        self.used, self.highest = size, max(self.highest, size)

    def reset(self):
        self.highest = self.used

    def peak(self):
        return Peak(self.highest)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Sparkler 9000", None)],
)
def test_peak_flops_are_known_only_for_devices_of_the_table(name, peak):
    memory = Memory()
    memory.name = name
    assert known_peak_flops(memory) == peak
    assert known_peak_flops(DeviceMemory(CPU)) is None


def test_the_memory_of_validation_is_measured_separately(tmp_path):
    metrics_logged, memory = {}, Memory()
    with process_groups.fake_group(1):
        processor = MetricsProcessor(Metrics(), None, CPU, dump_folder=str(tmp_path), values={})  # type: ignore[arg-type]
    processor.logger = SimpleNamespace(log=lambda metrics, step: metrics_logged.update(metrics))
    processor.memory, processor.total_steps = memory, 1
    memory.use(10)
    memory.use(2)
    with processor.paused():
        memory.use(5)
        memory.use(2)
        processor.log_validation(1.0, 1)
    assert metrics_logged["validation_metrics/memory/max_reserved(%)"] == 5
    assert memory.peak().reserved == 2, "the peak of the next steps starts anew"
    assert processor._interval_peak().reserved == 10, "the peak of the steps since the last line"
