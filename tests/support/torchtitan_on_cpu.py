"""Run `torchtitan.train` on a CPU over gloo, which torchtitan 0.3 does not support.

`python -m tests.support.torchtitan_on_cpu` takes the arguments of `torchtitan.train`. On a GPU, none of this is needed.
"""

import runpy
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as utils


class Cpu:
    """`torch.cpu`, with the additional functions that torchtitan calls to get a GPU's name and memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any) -> str:
        return "CPU"

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=2**30)

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


# Set before other modules import these values. Without an accelerator torchtitan uses "cuda".
utils.device_type, utils.device_module = "cpu", Cpu()

import torchtitan.trainer as trainer  # noqa: E402

from titanplans import kernels  # noqa: E402

kernels.install("cpu")
trainer.dist_utils.set_pg_timeouts = lambda **kwargs: (
    None
)  # torchtitan's barrier passes a device, which gloo does not support
runpy.run_module("torchtitan.train", run_name="__main__")
