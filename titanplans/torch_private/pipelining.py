"""Pipelines: the order of computations that each of torch's schedules gives a rank."""

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

SPLITS_BACKWARD = torch.__version__ >= "2.13"
"""Whether a backward of inputs and one of weights give all gradients: torch 2.11 counts some twice."""

_KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}
"""Our words for torch's computations."""


def rank_orders(
    schedule: str, ranks: int, stages: int, microbatches: int
) -> list[list[tuple[int, Any, int]]]:
    """Return stage, kind and micro batch of each computation of each rank, in order.

    No process group is needed: torch builds a schedule from the numbers of ranks and stages alone.
    """
    # Here, since it imports the compiler.
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    cls: Any = get_schedule_class(schedule)
    own = [
        SimpleNamespace(stage_index=at, num_stages=stages, group_size=ranks, group_rank=0, submod=None)
        for at in range(0, stages, ranks)
    ]
    built = cls(own[0] if issubclass(cls, PipelineScheduleSingle) else own, microbatches)
    orders = [_computations(built.pipeline_order[rank]) for rank in range(ranks)]
    if schedule == "1F1B":
        # In torch 2.13 this order begins the last rank's forwards at micro batch 1; the ranks run them from 0.
        for order in orders:
            numbers = count()
            order[:] = [
                (stage, kind, next(numbers) if kind == "forward" else number) for stage, kind, number in order
            ]
    return orders


def keep_forwards(schedule: Any) -> None:
    """Let a schedule of several stages a rank run forwards alone; torch 2.13's `eval` runs the rest, too, and fails."""
    forwards = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    for rank, actions in schedule.pipeline_order_with_comms.items():
        single = [part for action in actions for part in (action.sub_actions or (action,))]
        schedule.pipeline_order_with_comms[rank] = [
            action for action in single if action.computation_type.name in forwards
        ]


def without_views(outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return what a stage gives with copies of views, since split backwards detach it in place; contiguous, to be sent."""
    copies = (x._is_view() or not x.is_contiguous() for x in outputs)
    return tuple(
        x.clone(memory_format=torch.contiguous_format) if copy else x
        for x, copy in zip(outputs, copies, strict=True)
    )


def backward_of_inputs(
    outputs: list[torch.Tensor],
    gradients: Any,
    inputs: list[torch.Tensor],
    weights: Any,
) -> tuple[Any, Any]:
    """Return the gradients of a stage's inputs, and what `backward_of_weights` needs; `gradients` None: of a loss."""
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, inputs, iter(weights))


def backward_of_weights(weights: Any, left: Any) -> None:
    """Add the gradients of a stage's weights, with what `backward_of_inputs` has left.

    The graph is kept until then: torch goes through it once for each group of weights, and frees what several share.
    """
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(weights), left, retain_graph=True)


def _computations(actions: Any) -> list[tuple[int, Any, int]]:
    found: list[tuple[int, Any, int]] = []
    for action in filter(None, actions):  # torch has None for a step in which a rank is idle
        if action.computation_type.name == "OVERLAP_F_B":
            found += _computations(action.sub_actions)
        elif action.computation_type.name != "REDUCE_GRAD":  # the sum over data-parallel ranks
            kind = _KINDS[action.computation_type.name]
            found.append((action.stage_index, kind, action.microbatch_index))
    return found
