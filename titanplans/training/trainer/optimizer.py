"""torchtitan's optimizers and learning rates as a job says them, whatever the job that has written the checkpoint said."""

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
    """torchtitan's container, which steps a job's optimizers together and has their state by parameter."""

    def __init__(self, job: JobConfig, models: list[nn.Module]):
        # A compiled step takes its learning rate as a tensor, which foreach's does only if it is "capturable".
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


class LRSchedulers(LRSchedulersContainer):
    """torchtitan's. A checkpoint gives them the step alone: the rates are those of this job's schedule."""

    def __init__(self, job: JobConfig, optimizers: Optimizers):
        options = LRSchedulersContainer.Config(
            **vars(job.lr_scheduler) | {"total_steps": schedule_steps(job)}
        )
        self.schedulers = options.build(optimizers=optimizers, training_steps=job.training.steps).schedulers

    def get_metrics(self) -> dict[str, float]:
        """Return the learning rates by optimizer, and by group where groups have rates of their own."""
        metrics = {}
        schedulers: list[Any] = self.schedulers
        for scheduler in schedulers:
            key, rates = f"lr/{type(scheduler.optimizer).__name__}", scheduler.get_last_lr()
            if len(set(scheduler.base_lrs)) == 1:
                metrics[key] = float(rates[0])
            else:
                metrics |= {f"{key}/{number}": float(rate) for number, rate in enumerate(rates)}
        return metrics

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the step that was saved, and give each optimizer its rate for it."""
        step = state_dict["last_epoch"]
        schedulers: list[Any] = self.schedulers  # of torch's LambdaLR
        for scheduler in schedulers:
            rates = [
                rate * factor(step)
                for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": step, "_last_lr": rates})
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
