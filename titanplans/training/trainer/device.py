"""The device of this process: its type, its CPU threads and its memory."""

import os
import platform
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from titanplans.errors import ConfigError
from titanplans.extras import is_installed, missing_library
from titanplans.parallel.mesh.process_group import available_cores, default_device_type

_KIB, _GIB = 1024, 1024**3


def prepare_device() -> str:
    """Set the number of CPU threads; return the device type: "cuda", "xpu", … or "cpu".

    Raises:
        ConfigError: the installed torch or torchtitan can't run jobs (see `no_trainer`).
    """
    if (reason := no_trainer()) is not None:
        raise ConfigError(reason)
    device_type = default_device_type()
    if device_type == "cpu" and (ranks := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > 1:
        # By default every process uses every core, and with torchrun's OMP_NUM_THREADS=1 most cores are idle.
        torch.set_num_threads(max(1, available_cores() // ranks))
    return device_type


def no_trainer() -> str | None:
    """Return an error's text that says why the installed torch or torchtitan can't run jobs; None if they can."""
    alternative = "or train in your own loop with titanplans.parallel, which needs no torchtitan"
    if torch.__version__ < "2.13":
        version = torch.__version__
        return f"torchtitan 0.3 needs torch 2.13, and this is torch {version}: install 2.13 or newer, {alternative}"
    if not is_installed("torchtitan"):
        return f"{missing_library('torchtitan', 'a job')}, {alternative}"
    return None


class Peak(NamedTuple):
    """Peak memory since the last reset in bytes, and the allocator's failures. On a CPU only `reserved` is set."""

    reserved: int
    active: int = 0
    retries: int = 0
    out_of_memory: int = 0


class DeviceMemory:
    """Measures memory: of torch's allocator on an accelerator, or of this process (its resident set) on a CPU.

    Attributes:
        name: name of the device, e.g. "NVIDIA H100 80GB HBM3", "AMD EPYC 9654 96-Core Processor".
        total: memory of the accelerator, or of the machine, in bytes.
    """

    def __init__(self, device: torch.device):
        self.device, self.is_host = device, device.type == "cpu"
        if self.is_host:
            self.name = _processor_name()
            self.total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        else:
            module = torch.get_device_module(device)
            self.name = module.get_device_name(device)
            self.total = module.get_device_properties(device).total_memory

    def peak(self) -> Peak:
        """Return the peak since the last reset; on a CPU, since the process started."""
        if self.is_host:
            return Peak(peak_resident_bytes())
        stats = torch.accelerator.memory_stats(self.device)
        names = ("reserved_bytes.all.peak", "active_bytes.all.peak", "num_alloc_retries", "num_ooms")
        return Peak(*(stats.get(name, 0) for name in names))

    def reset(self) -> None:
        """Start a new peak. On a CPU do nothing, since the operating system keeps one peak per process."""
        if not self.is_host:
            torch.accelerator.reset_peak_memory_stats(self.device)

    def gib(self, size: int) -> float:
        """Convert bytes to GiB."""
        return size / _GIB

    def percent(self, size: int) -> float:
        """Convert bytes to a percentage of `total`."""
        return 100 * size / self.total


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process since it started, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # On Linux getrusage would be wrong: a forked child inherits its parent's ru_maxrss.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * _KIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
