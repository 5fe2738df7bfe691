"""The micro batches of a step through the stages of a pipeline, in the order in which a schedule of torch's computes.

All stages are on this rank. As on several, a stage gets leaves of its own, and its backward begins with their gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from titanplans.split.stages.schedules import Action, in_one_order, orders
from titanplans.split.stages.stage import Stage
from titanplans.torch_private.pipelining import backward_of_inputs, backward_of_weights, without_views

Place = tuple[int, int]
"""Numbers of a stage and of a micro batch."""


def order_of(schedule: str, stages: int, microbatches: int) -> tuple[Action, ...]:
    """Return the order of a schedule for so many stages, all on one rank."""
    return in_one_order(orders(schedule, 1, stages, microbatches))


def run_in_order(
    stages: Sequence[Stage],
    order: Sequence[Action],
    forward: Callable[[int, Stage, Sequence[torch.Tensor]], Any],
    loss: Callable[[int, Any], torch.Tensor],
) -> None:
    """Run forwards and backwards.

    Args:
        stages: all of them.
        order: of the computations.
        forward: of a micro batch, by its number, in a stage that is given what the one before has made.
        loss: of a micro batch, by its number, and what the last stage has returned.
    """
    taken: dict[Place, list[torch.Tensor]] = {}
    given: dict[Place, list[torch.Tensor]] = {}
    left: dict[Place, Any] = {}
    for at, kind, number in order:
        here, last = (at, number), at == len(stages) - 1
        weights = list(stages[at].model.parameters())
        if kind == "forward":
            before = given.get((at - 1, number), [])
            taken[here] = [x.detach().requires_grad_(x.requires_grad) for x in before]
            output = forward(number, stages[at], taken[here])
            given[here] = [loss(number, output)] if last else list(without_views(output))
            continue
        gradients = None if last else [x.grad for x in taken[at + 1, number]]
        if kind == "backward_input" and at > 0:
            filled = gradients and [
                _or_zeros(grad, x) for grad, x in zip(gradients, given[here], strict=True)
            ]
            _, left[here] = backward_of_inputs(given[here], filled, taken[here], weights)
        elif kind == "backward" or (
            kind == "backward_weight" and at == 0
        ):  # torch leaves all to the latter there
            _backward(given[here], gradients)
        elif kind == "backward_weight":
            backward_of_weights(weights, left[here])


def _or_zeros(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None) -> None:
    pairs = [(x, None) for x in outputs] if gradients is None else list(zip(outputs, gradients, strict=True))
    used = [(x, grad) for x, grad in pairs if x.requires_grad and (gradients is None or grad is not None)]
    if used:
        torch.autograd.backward([x for x, _ in used], [grad for _, grad in used])
