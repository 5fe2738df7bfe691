"""The device of this process: which one, its CPU threads, and its memory."""

import importlib.util
import os
import platform
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from titanplans.errors import ConfigError
from titanplans.parallel.mesh.process_group import available_cores, default_device_type

_KIB, _GIB = 1024, 1024**3


def prepare_device() -> str:
    """Settle the device type and the number of CPU threads; return "cuda", "xpu", … or "cpu".

    Raises:
        ConfigError: no job runs here.
    """
    if (why := no_trainer()) is not None:
        raise ConfigError(why)
    device_type = default_device_type()
    if device_type == "cpu" and (ranks := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > 1:
        # Alone, torch takes every core. Several would each, and torchrun's OMP_NUM_THREADS=1 leaves most idle.
        torch.set_num_threads(max(1, available_cores() // ranks))
    return device_type


def no_trainer() -> str | None:
    """Return why no job runs here, or None. What needs no torchtitan runs on torch 2.11, too."""
    own = "or train in your own loop by titanplans.parallel, which needs no torchtitan"
    if torch.__version__ < "2.13":
        return f"torchtitan 0.3 needs torch 2.13, and this is torch {torch.__version__}: install torch 2.13, {own}"
    if importlib.util.find_spec("torchtitan") is None:
        return f"torchtitan is not installed: pip install 'torchtitan>=0.3,<0.4', {own}"
    return None


class Peak(NamedTuple):
    """The largest memory since it was last reset, in bytes, and the allocator's troubles; of a CPU `reserved` alone."""

    reserved: int
    active: int = 0
    retries: int = 0
    out_of_memory: int = 0


class DeviceMemory:
    """The memory of `device`: of an accelerator torch's allocator's; of a CPU this process's resident set.

    Attributes:
        name: the device's, e.g. "NVIDIA H100 80GB HBM3", "AMD EPYC 9654 96-Core Processor".
        total: its bytes, or the machine's.
    """

    def __init__(self, device: torch.device):
        self.device, self.is_host = device, device.type == "cpu"
        if self.is_host:
            self.name = _processor()
            self.total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        else:
            module = torch.get_device_module(device)
            self.name = module.get_device_name(device)
            self.total = module.get_device_properties(device).total_memory

    def peak(self) -> Peak:
        """Return the peak since the last reset; of a process, whose peak can't be reset, since it started."""
        if self.is_host:
            return Peak(peak_resident_bytes())
        stats = torch.accelerator.memory_stats(self.device)
        names = ("reserved_bytes.all.peak", "active_bytes.all.peak", "num_alloc_retries", "num_ooms")
        return Peak(*(stats.get(name, 0) for name in names))

    def reset(self) -> None:
        """Begin a new peak; does nothing on a CPU, as an operating system keeps one a process."""
        if not self.is_host:
            torch.accelerator.reset_peak_memory_stats(self.device)

    def gib(self, size: int) -> float:
        """Return bytes as GiB."""
        return size / _GIB

    def percent(self, size: int) -> float:
        """Return bytes as a percentage of `total`."""
        return 100 * size / self.total


def peak_resident_bytes() -> int:
    """The largest resident set of this process since it started, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage on Linux: a child starts with its parent's ru_maxrss.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * _KIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
