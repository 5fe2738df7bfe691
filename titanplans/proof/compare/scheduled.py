"""The micro batches of a step through the stages of a pipeline, in the order in which a schedule of torch's computes.

All stages are on this rank. As on several, a stage gets leaves of its own, and its backward begins with their gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from titanplans.split.stages.schedules import in_one_order, orders
from titanplans.split.stages.stage import Stage
from titanplans.torch_private.pipelining import backward_of_inputs, backward_of_weights, without_views

Place = tuple[int, int]
"""Numbers of a stage and of a micro batch."""


def run_in_order(
    stages: Sequence[Stage],
    schedule: str,
    microbatches: int,
    forward: Callable[[int, Stage, Sequence[torch.Tensor]], Any],
    loss: Callable[[int, Any], torch.Tensor],
) -> None:
    """Run forwards and backwards, in the order that the schedule has with all stages on one rank.

    Args:
        stages: all of them.
        schedule: its name.
        microbatches: how many.
        forward: of a micro batch, by its number, in a stage that is given what the one before has made.
        loss: of a micro batch, by its number, and what the last stage has returned.
    """
    taken: dict[Place, list[torch.Tensor]] = {}
    given: dict[Place, list[torch.Tensor]] = {}
    left: dict[Place, Any] = {}
    for at, kind, number in in_one_order(orders(schedule, 1, len(stages), microbatches)):
        here, last = (at, number), at == len(stages) - 1
        weights = list(stages[at].model.parameters())
        if kind == "forward":
            before = given.get((at - 1, number), [])
            taken[here] = [x.detach().requires_grad_(x.requires_grad) for x in before]
            output = forward(number, stages[at], taken[here])
            given[here] = [loss(number, output)] if last else list(without_views(output))
            continue
        made = given[here]
        gradients = [torch.ones_like(made[0])] if last else [x.grad for x in taken[at + 1, number]]
        pairs = list(zip(made, gradients, strict=True))
        if kind == "backward_input" and at > 0:
            filled = [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]
            _, left[here] = backward_of_inputs(made, filled, taken[here], weights)
        elif kind == "backward_weight" and at > 0:
            backward_of_weights(weights, left[here])
        elif kind != "backward_input":  # of the first stage torch leaves all to the backward of its weights
            used = [(x, gradient) for x, gradient in pairs if x.requires_grad and gradient is not None]
            torch.autograd.backward([x for x, _ in used], [gradient for _, gradient in used])
