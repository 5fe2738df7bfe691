"""Update an optimizer that was built before `parallelize` to the parameters of the parallelised model."""

import torch
from torch import nn

from titanplans.errors import ParallelError
from titanplans.parallel.optimizers.muon import Muon
from titanplans.parallel.record import record_of
from titanplans.split.parameters.replaced import successor_of


def carry_over(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Replace each parameter in `optimizer` by the parameter that replaced it in `model`; group options do not change.

    Args:
        optimizer: any optimizer. If it was built before `parallelize`, it must not have taken a step.
        model: returned by `parallelize`.

    Raises:
        ParallelError: the optimizer has state of replaced parameters, or adapters were added after it was built.
    """
    name, remedy = (
        type(optimizer).__name__,
        "build it on the parameters of the model that parallelize returned",
    )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    replaced = {parameter for parameter in parameters if successor_of(parameter) is not parameter}
    if record_of(model).adapters and (replaced or not any(p.requires_grad for p in parameters)):
        raise ParallelError(f"{name} was built before adapters were added, and has none of them: {remedy}")
    if any(optimizer.state.get(parameter) for parameter in replaced):
        raise ParallelError(
            f"{name} was built before the model was parallelised, and has state of parameters that were replaced: {remedy}, "
            "and load its state from a checkpoint"
        )
    for parameter in replaced:
        optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        group["params"][:] = [successor_of(parameter) for parameter in group["params"]]
    if isinstance(optimizer, Muon):
        optimizer.sections = {successor_of(parameter): s for parameter, s in optimizer.sections.items()}
