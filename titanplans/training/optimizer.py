"""torchtitan's optimizers as a job says them, also after a checkpoint that was written under another implementation."""

from typing import Any

import torch

from titanplans.parallel import Compile
from titanplans.parallel.compile import compile_optimizer


def prepare_optimizer(optimizer: torch.optim.Optimizer, compiled: Compile) -> None:
    """Compile the step of `optimizer` if `compiled` says so, and keep its implementation through checkpoints.

    A checkpoint holds what an optimizer was made with, and torch takes all of it over when it loads one. Here all of it
    stays as the job says: a weight decay that was changed takes effect. The learning rate, which is a tensor in a
    compiled step and saved as such, would not even load into an optimizer that has a number, so it is saved as one.

    Raises:
        ParallelError: the step can't be compiled.
    """
    if compiled.enable and "optimizer" in compiled.components:
        compile_optimizer(optimizer, compiled)
    optimizer.register_state_dict_post_hook(_save_numbers)
    optimizer.register_load_state_dict_pre_hook(_keep_settings)


def _save_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for group in state_dict["param_groups"]:
        group["lr"] = float(group["lr"])


def _keep_settings(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [
        loaded | {key: value for key, value in own.items() if key != "params"}
        for own, loaded in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    return state_dict | {"param_groups": groups}
