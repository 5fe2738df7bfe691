"""The memory size of a device."""

import os
from pathlib import Path

import torch

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory limit of this container, for cgroups of version 2 and 1. "max", or a number above the machine's
memory, means no limit."""


def memory(device: torch.device) -> int:
    """Return the total memory (used and free) of a GPU, or of the machine within its container's limit, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory  # creates no CUDA context
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path(file).read_text().strip() for file in _LIMITS if Path(file).exists()]
    return min([physical, *(int(limit) for limit in limits if limit != "max")])
