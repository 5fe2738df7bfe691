"""Parameters that several stages of a pipeline hold, such as the weight of an embedding that is tied to the head.

Each holder has the same values. It gets the sum of their gradients before each step, so that the same step keeps them equal,
to the bit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titanplans.split.gradients import local_of


class Holder(NamedTuple):
    """A stage that holds a parameter."""

    rank: int
    """In the group of the pipeline."""
    parameter: nn.Parameter | None
    """None: it is another rank's."""


@torch.no_grad()
def share_gradients(
    shared: Sequence[Sequence[Holder]], device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Give all holders of a parameter the sum of their gradients. A missing one counts as zero; where all are, they stay.

    Gradients lie as the parameters do (`titanplans.split.gradients.align_gradients`), equally in all stages.

    Args:
        shared: of each such parameter of the model its holders, in the order of the stages.
        device: on which `group` communicates.
        group: the ranks of the pipeline, which all call this together; None: all stages are on this one.
    """
    own = [[one.parameter for one in holders if one.parameter is not None] for holders in shared]
    for holders, parameters, exists in zip(shared, own, _exist(own, device, group), strict=True):
        if not parameters or not exists:
            continue
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _share(holders, group)


def _exist(
    own: Sequence[Sequence[nn.Parameter]], device: torch.device, group: dist.ProcessGroup | None
) -> list[bool]:
    """Return whether each parameter has a gradient in any stage."""
    here = [any(parameter.grad is not None for parameter in parameters) for parameters in own]
    if group is None or not here:
        return here
    there = torch.tensor(here, dtype=torch.int32, device=device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group)
    return [bool(exists) for exists in there.tolist()]


def _share(holders: Sequence[Holder], group: dist.ProcessGroup | None) -> None:
    grads = [None if one is None else local_of(one.grad) for _, one in holders]  # pyrefly: ignore[bad-argument-type]
    like = next(grad for grad in grads if grad is not None)
    given = [torch.empty_like(like) if grad is None else grad.contiguous() for grad in grads]
    others = dict.fromkeys(holder.rank for holder in holders if holder.parameter is None)
    operations = []
    for (rank, parameter), tensor in zip(holders, given, strict=True):
        if parameter is None:
            operations.append(dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank))
        else:
            operations += [dist.P2POp(dist.isend, tensor, group=group, group_peer=one) for one in others]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    total = torch.stack(given).sum(0)  # in the order of the stages: the same bits on each rank
    for grad in grads:
        if grad is not None:
            grad.copy_(total)
