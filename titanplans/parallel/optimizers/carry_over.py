"""Moves an optimizer that was made before `parallelize` to the parameters that have replaced its own."""

import torch
from torch import nn

from titanplans.errors import ParallelError
from titanplans.parallel.optimizers.muon import Muon
from titanplans.parallel.record import record_of
from titanplans.split.parameters.replaced import successor_of


def carry_over(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Replace the parameters in the groups of `optimizer` by their successors; the options of the groups stay.

    Args:
        optimizer: any; before its first step, if it was made before `parallelize`.
        model: as `parallelize` returned it.

    Raises:
        ParallelError: it has state of the replaced parameters; or adapters were added after it was made.
    """
    name, instead = (
        type(optimizer).__name__,
        "make it on the parameters of the model that parallelize returned",
    )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    replaced = {parameter for parameter in held if successor_of(parameter) is not parameter}
    if record_of(model).adapters and (replaced or not any(p.requires_grad for p in held)):
        raise ParallelError(f"{name} was made before adapters were added, and holds none of them: {instead}")
    if any(optimizer.state.get(parameter) for parameter in replaced):
        raise ParallelError(
            f"{name} was made before the model was parallelised, and its state is of the parameters before: {instead}, and "
            "load its state from a checkpoint"
        )
    for parameter in replaced:
        optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        group["params"][:] = [successor_of(parameter) for parameter in group["params"]]
    if isinstance(optimizer, Muon):
        optimizer.sections = {successor_of(parameter): own for parameter, own in optimizer.sections.items()}
