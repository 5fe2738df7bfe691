"""The device of this process, settled before torchtitan is imported.

torchtitan 0.3 picks its device when `torchtitan.tools.utils` is imported, and other modules copy the choice. Without an
accelerator it picks CUDA. `prepare_device` therefore comes first: on an accelerator it leaves torchtitan's choice, on a
CPU it sets `HostDevice`, which adds to `torch.cpu` what torchtitan calls on `torch.cuda`.

All that adapts torchtitan to a CPU lives here. The models' CPU kernels are in `titanplans.kernels`.
"""

import importlib.util
import math
import os
import platform
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from titanplans.errors import ConfigError
from titanplans.parallel.mesh.process_group import available_cores, default_device_type

_KIB = 1024


def prepare_device() -> str:
    """Settle the device type and the number of CPU threads; return "cuda", "xpu", … or "cpu".

    Call it before the first import of torchtitan, once per process; a second call answers the same.

    Raises:
        ConfigError: no job runs here.
        RuntimeError: torchtitan was imported before, and has chosen another device.
    """
    if (why := no_trainer()) is not None:
        raise ConfigError(why)
    device_type = default_device_type()
    if device_type == "cpu":
        _use_host_device()
        if (ranks := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > 1:
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


class HostDevice:
    """`torch.cpu`, completed by the part of `torch.cuda`'s interface that torchtitan calls.

    Memory is the resident set of this process, not an allocator's: its peak since the process
    started, which can't be reset, against the machine's physical memory.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """0. `torch.cpu` says "cpu", which `torch.distributed.barrier(device_ids=[…])` refuses."""
        return 0

    def get_device_name(self, device: torch.device | None = None) -> str:
        """The processor's model name, e.g. "AMD EPYC 9654 96-Core Processor"."""
        cpuinfo = Path("/proc/cpuinfo")
        if cpuinfo.exists():
            for line in cpuinfo.read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    def get_device_properties(self, device: torch.device | None = None) -> SimpleNamespace:
        """An object with `name` and `total_memory`, the machine's physical memory in bytes."""
        total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name=self.get_device_name(), total_memory=total_memory)

    def memory_stats(self, device: torch.device | None = None) -> dict[str, int]:
        """The two peaks that torchtitan reads, both the process's peak resident set, in bytes."""
        peak = peak_resident_bytes()
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self) -> None:
        """Does nothing: an operating system keeps one peak per process."""

    def empty_cache(self) -> None:
        """Does nothing: there is no caching allocator."""


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


def _use_host_device() -> None:
    if "torchtitan.tools.utils" not in sys.modules:
        import torchtitan.tools.utils as titan_utils  # imports nothing that copies the choice

        titan_utils.device_type = "cpu"
        titan_utils.device_module = HostDevice()  # pyrefly: ignore[bad-assignment]  a module in all but type
        titan_utils.get_peak_flops = lambda device_name: math.nan  # else an A100's, with a warning
    elif not isinstance(sys.modules["torchtitan.tools.utils"].device_module, HostDevice):
        raise RuntimeError(
            "torchtitan was imported before prepare_device(): its modules have chosen "
            f"{sys.modules['torchtitan.tools.utils'].device_type!r} on a machine without an accelerator"
        )
