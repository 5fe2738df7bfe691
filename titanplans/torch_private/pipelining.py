"""Pipelining: orders of computations in torch's schedules, and backwards that are split by inputs and weights."""

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

SPLITS_BACKWARD = torch.__version__ >= "2.13"
"""Whether the backward can be split into a backward for inputs and one for weights. False in torch 2.11, which then
counts some gradients twice."""

_KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}
"""Names of torch's computation types in titanplans."""


def rank_orders(
    schedule: str, ranks: int, stages: int, microbatches: int
) -> list[list[tuple[int, Any, int]]]:
    """Return the computations of each rank in order, as (stage, kind, micro batch).

    No process group is needed, since torch builds a schedule from the numbers of ranks and stages.
    """
    # Imported here, since it imports the compiler.
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    cls: Any = get_schedule_class(schedule)
    # Stand-ins for the stages of rank 0, with only the attributes that a schedule uses.
    stages_of_rank = [
        SimpleNamespace(stage_index=index, num_stages=stages, group_size=ranks, group_rank=0, submod=None)
        for index in range(0, stages, ranks)
    ]
    instance = cls(
        stages_of_rank[0] if issubclass(cls, PipelineScheduleSingle) else stages_of_rank, microbatches
    )
    orders = [_computations(instance.pipeline_order[rank]) for rank in range(ranks)]
    if schedule == "1F1B":
        # In torch 2.13 this order numbers the forwards of the last rank from 1, but the ranks run them from 0.
        for order in orders:
            numbers = count()
            order[:] = [
                (stage, kind, next(numbers) if kind == "forward" else number) for stage, kind, number in order
            ]
    return orders


def keep_only_forwards(schedule: Any) -> None:
    """Remove backwards from a schedule with several stages per rank, since `eval` of torch 2.13 runs them and fails."""
    forwards = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    for rank, actions in schedule.pipeline_order_with_comms.items():
        single = [sub_action for action in actions for sub_action in (action.sub_actions or (action,))]
        schedule.pipeline_order_with_comms[rank] = [
            action for action in single if action.computation_type.name in forwards
        ]


def copy_views(outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a stage, with copies of views and of non-contiguous tensors.

    A split backward detaches outputs in place, which views do not allow. Only contiguous tensors can be sent.
    """
    copies = (x._is_view() or not x.is_contiguous() for x in outputs)
    return tuple(
        x.clone(memory_format=torch.contiguous_format) if copy else x
        for x, copy in zip(outputs, copies, strict=True)
    )


def shapes_of_gradients(outputs: Any) -> Any:
    """Return the metadata of the gradients of `outputs`, as the next stage sends it to the stage that computed `outputs`."""
    from torch.distributed.pipelining._utils import _derive_grad_metas, _StageBackwardMeta

    return _StageBackwardMeta(backward_metas=_derive_grad_metas(outputs))


def is_shapes_sent(meta: Any) -> bool:
    """Whether `meta` describes the outputs that a stage sends to the next one, and not the gradients that it sends back."""
    from torch.distributed.pipelining._utils import _StageForwardMeta

    return isinstance(meta, _StageForwardMeta)


def backward_of_inputs(
    outputs: list[torch.Tensor],
    gradients: Any,
    inputs: list[torch.Tensor],
    weights: Any,
) -> tuple[Any, Any]:
    """Return the gradients of a stage's inputs, and the state that `backward_of_weights` needs.

    `gradients` are the gradients of the outputs; None if the output is the loss.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, inputs, iter(weights))


def backward_of_weights(weights: Any, state: Any) -> None:
    """Accumulate the gradients of a stage's weights, from the `state` that `backward_of_inputs` returned."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    # torch traverses the graph once for each group of weights, and would free nodes that several groups share.
    stage_backward_weight(iter(weights), state, retain_graph=True)


def _computations(actions: Any) -> list[tuple[int, Any, int]]:
    computations: list[tuple[int, Any, int]] = []
    for action in filter(None, actions):  # None: the rank is idle in this step
        if action.computation_type.name == "OVERLAP_F_B":
            computations += _computations(action.sub_actions)
        # All other actions are reductions over data-parallel ranks.
        elif action.computation_type.name not in ("REDUCE_GRAD", "WAIT_REDUCE_GRAD"):
            kind = _KINDS[action.computation_type.name]
            computations.append((action.stage_index, kind, action.microbatch_index))
    return computations
