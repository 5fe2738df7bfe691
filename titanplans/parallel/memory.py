"""The memory that a device has."""

import os
from pathlib import Path

import torch

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of this container, where there is one: cgroups of version 2 and 1. "max", or more than there is, is no limit."""


def memory(device: torch.device) -> int:
    """Return the bytes of memory of a GPU; or of the machine, within its container's limit, used ones included."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory  # asks without a context on the GPU
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path(file).read_text().strip() for file in _LIMITS if Path(file).exists()]
    return min([there, *(int(limit) for limit in limits if limit != "max")])
