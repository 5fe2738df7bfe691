"""Helpers of the trainer: device, log lines, and the output at the end of a rank."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from tests.support import process_groups
from tests.support.programs import run_python
from titanplans.config.sections.run import Metrics
from titanplans.errors import UserError
from titanplans.parallel.mesh.process_group import available_cores, default_device_type
from titanplans.training.launch.exit_status import fail, refuse
from titanplans.training.launch.logs import _HIDDEN, _is_shown
from titanplans.training.trainer.device import DeviceMemory, Peak, peak_resident_bytes, prepare_device
from titanplans.training.trainer.metrics import (
    MetricsProcessor,
    _three_digits,
    format_seconds,
    known_peak_flops,
)
from titanplans.training.trainer.step import FiniteCheck

CPU = torch.device("cpu")

on_a_cpu = pytest.mark.skipif(
    default_device_type() != "cpu", reason="what a machine without accelerator gets"
)


def test_all_ranks_agree_on_finite_weights_also_with_an_empty_shard():
    model = torch.nn.ParameterList([torch.ones(2), torch.empty(0)])
    with process_groups.fake_group(2):
        assert FiniteCheck([model], torch.device("cpu")).on_all_ranks()
        with torch.no_grad():
            model[0][1] = torch.nan
        assert not FiniteCheck([model], torch.device("cpu")).on_all_ranks()


@on_a_cpu
def test_ranks_of_a_machine_divide_its_cores(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        prepare_device()
        assert torch.get_num_threads() == max(1, available_cores() // 2)
    finally:
        torch.set_num_threads(before)


def test_host_memory_is_the_resident_set():
    before = peak_resident_bytes()
    block = bytearray(64 * 2**20)
    assert peak_resident_bytes() >= before
    memory = DeviceMemory(CPU)
    assert 64 * 2**20 < memory.peak().reserved < memory.total
    assert memory.name
    del block


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


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Sparkler 9000", None)],
)
def test_peak_flops_are_known_only_for_devices_of_the_table(name, peak):
    memory = Memory()
    memory.name = name
    assert known_peak_flops(memory) == peak
    assert known_peak_flops(DeviceMemory(CPU)) is None


class Memory(DeviceMemory):
    """The memory of an accelerator, which a test sets."""

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


def test_the_log_filter_keeps_progress():
    def shown(name, level, module="trainer", function="train"):
        record = logging.LogRecord(name, level, f"{module}.py", 0, "words", (), None, function)
        return _is_shown(record)

    assert shown("root", logging.INFO), "progress of torchtitan"
    assert shown("titanplans.training.trainer.step", logging.INFO)
    assert shown("datasets", logging.WARNING)
    assert not shown("datasets", logging.INFO)
    assert not shown("root", logging.INFO, "utils", "collect")
    assert not shown("torchao", logging.WARNING)
    for name in ("root", "datasets", "torchao", "titanplans.training.trainer.step"):
        assert shown(name, logging.ERROR, "utils", "collect")


def test_a_job_continues_if_its_log_is_closed():
    done = run_python(
        "-c",
        "import logging, os, sys; from titanplans.training.launch.logs import init_logging; init_logging(0);"
        "ours, theirs = os.pipe(); os.close(ours); os.dup2(theirs, 1);"
        "[logging.getLogger('titanplans').info('words') for _ in range(3)]",
    )
    assert (done.returncode, done.stderr) == (0, "stdout was closed: the job goes on without its log\n")


def test_filtered_functions_exist_in_torchtitan():
    """The functions exist in torchtitan, and each logs."""
    import inspect

    import torchtitan.distributed.utils
    import torchtitan.tools.utils

    modules = (torchtitan.distributed.utils, torchtitan.tools.utils)
    sources = {(module.__name__.rpartition(".")[2], module): inspect.getsource(module) for module in modules}
    for name, function in _HIDDEN:
        texts = [text for (file, _), text in sources.items() if file == name]
        assert any(f"def {function}(" in text for text in texts), (name, function)


def test_refusal_is_one_line(capsys):
    assert refuse(UserError("[training] steps = 0: at least 1"), rank=0) == 2
    assert capsys.readouterr().err == "error: [training] steps = 0: at least 1\n"


def failing(rank: int) -> int:
    try:
        return 1 // 0
    except ZeroDivisionError as error:
        return fail(error, rank)


def test_failure_of_a_rank_prints_its_traceback_and_one_line(capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert failing(rank=3) == 1
    output = capsys.readouterr().err
    assert output.startswith("rank 3: Traceback (most recent call last):")
    assert output.endswith("\nerror: rank 3 failed: ZeroDivisionError: integer division or modulo by zero\n")


def test_failure_is_reported_to_the_launcher_of_the_rank(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert failing(rank=3) == 1
    assert capsys.readouterr().err == ""
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ZeroDivisionError: integer division or modulo by zero"
    assert "return 1 // 0" in message["extraInfo"]["py_callstack"]
