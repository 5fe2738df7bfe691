"""Parameters that several stages of a pipeline hold, such as the weight of an embedding that is tied to the head.

Each holder has the same values. It gets the sum of their gradients before each step, so that the same step keeps them equal,
to the bit.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from titanplans.split.gradients import local_of


class SharedParameters:
    """The parameters that several stages hold, as a rank of a pipeline has them.

    Args:
        names: of each such parameter its name in each stage that holds it, the values of `Stages.shared`.
        own: the models of the stages on this rank, by their numbers.
        ranks: of each stage, in `group`.
        group: the ranks of the pipeline; None: all stages are on this one.
    """

    def __init__(
        self,
        names: Sequence[Mapping[int, str]],
        own: Mapping[int, nn.Module],
        ranks: Sequence[int] = (),
        group: dist.ProcessGroup | None = None,
    ):
        self._names, self._own, self._ranks, self._group = names, own, ranks, group

    def held(self) -> list[dict[int, nn.Parameter]]:
        """Return each parameter as stages on this rank hold it, by their numbers."""
        if not self._names:
            return []
        named = {at: dict(model.named_parameters(remove_duplicate=False)) for at, model in self._own.items()}
        return [{at: named[at][name] for at, name in names.items() if at in named} for names in self._names]

    def copies(self) -> set[int]:
        """Return the `id`s of the parameters here that an earlier stage holds, too: a norm counts them there."""
        pairs = zip(self._names, self.held(), strict=True)
        return {id(held[at]) for names, held in pairs for at in held if at != min(names)}

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give all holders of a parameter the sum of their gradients. All ranks of the pipeline call this together.

        A missing gradient counts as zero; where all are missing, they stay. Gradients lie as the parameters do
        (`titanplans.split.gradients.align_gradients`), equally in all stages.
        """
        held = self.held()
        exist = [any(parameter.grad is not None for parameter in holders.values()) for holders in held]
        if self._group is not None and held:
            model = next(iter(self._own.values()))
            anywhere = torch.tensor(exist, dtype=torch.int32, device=next(model.parameters()).device)
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, self._group)
            exist = anywhere.tolist()
        for names, holders, exists in zip(self._names, held, exist, strict=True):
            if not holders or not exists:
                continue
            grads = {}
            for at, parameter in holders.items():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads[at] = local_of(parameter.grad)
            self._sum(list(names), grads)

    def _sum(self, stages: Sequence[int], grads: Mapping[int, torch.Tensor]) -> None:
        """Make each of `grads`, by the stage that has it, the sum of those of all `stages` that hold the parameter."""
        like = next(iter(grads.values()))
        parts = {at: grads[at].contiguous() if at in grads else torch.empty_like(like) for at in stages}
        elsewhere = {at: self._ranks[at] for at in stages if at not in grads}
        sent = [(dist.isend, parts[at], rank) for at in grads for rank in dict.fromkeys(elsewhere.values())]
        taken = [(dist.irecv, parts[at], rank) for at, rank in elsewhere.items()]
        operations = [
            dist.P2POp(op, part, group=self._group, group_peer=rank) for op, part, rank in sent + taken
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        # In the order of the stages: the same bits on each rank.
        total = torch.stack(list(parts.values())).sum(0)
        for grad in grads.values():
            grad.copy_(total)
