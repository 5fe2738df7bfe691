"""torchtitan's containers of optimizers and schedulers. They keep the job's settings when a checkpoint is loaded."""

from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

from titanplans.config import JobConfig
from titanplans.config.compatibility.job import schedule_steps
from titanplans.parallel import Compile
from titanplans.parallel.compile import compile_optimizer
from titanplans.parallel.optimizers.build import build_optimizers


class Optimizers(OptimizersContainer):
    """A job's optimizers, which step together and save their state by parameter name."""

    def __init__(self, job: JobConfig, models: list[nn.Module]):
        # torchtitan's __init__ is not called: it would build its own optimizers.
        # A compiled step takes the learning rate as a tensor, which foreach supports only if it is "capturable".
        compiled = job.compile.enable and "optimizer" in job.compile.components
        is_foreach = job.optimizer.implementation == "foreach"
        settings = {"capturable": True} if compiled and is_foreach else {}
        self.model_parts = models
        self.optimizers = [
            optimizer for model in models for optimizer in build_optimizers(model, job.optimizer, **settings)
        ]
        if job.optimizer.implementation == "fused_opt_states_bf16":
            self._register_bf16_optimizer_state_hook()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self._post_init([parameter for group in groups for parameter in group["params"]])


def prepare_optimizer(optimizer: torch.optim.Optimizer, compiled: Compile) -> None:
    """Compile the step of `optimizer` if [compile] names it, and keep the job's settings when a checkpoint is loaded.

    Raises:
        ParallelError: the step can't be compiled.
    """
    if compiled.enable and "optimizer" in compiled.components:
        compile_optimizer(optimizer, compiled)
    # The learning rate of a compiled step is a tensor. It can't be loaded into an optimizer whose learning rate is a
    # number.
    optimizer.register_state_dict_post_hook(_save_rates_as_numbers)
    # torch's load_state_dict adopts all settings of the saved param groups, so a changed weight decay would have no effect.
    optimizer.register_load_state_dict_pre_hook(_keep_job_settings)


def _save_rates_as_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for group in state_dict["param_groups"]:
        group["lr"] = float(group["lr"])


def _keep_job_settings(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [
        loaded | {key: value for key, value in current.items() if key != "params"}
        for current, loaded in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    return state_dict | {"param_groups": groups}


class LRSchedulers(LRSchedulersContainer):
    """A job's learning-rate schedulers. They load only the step from a checkpoint, and follow the job's schedule."""

    def __init__(self, job: JobConfig, optimizers: Optimizers):
        options = LRSchedulersContainer.Config(
            **vars(job.lr_scheduler) | {"total_steps": schedule_steps(job)}
        )
        self.schedulers = options.build(optimizers=optimizers, training_steps=job.training.steps).schedulers

    def get_metrics(self) -> dict[str, float]:
        """Return the learning rates by optimizer, and by param group if the groups' base rates differ."""
        metrics = {}
        schedulers: list[Any] = self.schedulers
        for scheduler in schedulers:
            key, rates = f"lr/{type(scheduler.optimizer).__name__}", scheduler.get_last_lr()
            if len(set(scheduler.base_lrs)) == 1:
                metrics[key] = float(rates[0])
            else:
                metrics |= {f"{key}/{index}": float(rate) for index, rate in enumerate(rates)}
        return metrics

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved step, with the rates of this job's schedule at that step."""
        step = state_dict["last_epoch"]
        schedulers: list[Any] = self.schedulers  # each a LambdaLR
        for scheduler in schedulers:
            rates = [
                rate * factor(step)
                for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": step, "_last_lr": rates})
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                if isinstance(
                    group["lr"], torch.Tensor
                ):  # change the tensor in place: the compiled step uses this object
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
