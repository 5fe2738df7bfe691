"""Parameters that several pipeline stages hold, such as the weight of an embedding that is tied to the head."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from titanplans.split.gradients import local_of


class SharedParameters:
    """The parameters that several stages hold, as seen by a pipeline rank.

    All holders start with the same values. Before each step they get the sum of their gradients, so that the same
    update keeps them bitwise equal.

    Args:
        names: for each such parameter, its name in each stage that holds it (the values of `Stages.shared`).
        models: the models of the stages on this rank, by stage index.
        ranks: the rank of each stage in `group`.
        group: the pipeline ranks; None: all stages are on this rank.
    """

    def __init__(
        self,
        names: Sequence[Mapping[int, str]],
        models: Mapping[int, nn.Module],
        ranks: Sequence[int] = (),
        group: dist.ProcessGroup | None = None,
    ):
        self._names, self._models, self._ranks, self._group = names, models, ranks, group

    def local_parameters(self) -> list[dict[int, nn.Parameter]]:
        """Return, for each shared parameter, its copies in the stages on this rank, by stage index."""
        if not self._names:
            return []
        named = {i: dict(model.named_parameters(remove_duplicate=False)) for i, model in self._models.items()}
        return [{i: named[i][name] for i, name in names.items() if i in named} for names in self._names]

    def duplicates(self) -> set[int]:
        """Return the `id`s of local parameters that an earlier stage holds, too: a norm counts them there."""
        pairs = zip(self._names, self.local_parameters(), strict=True)
        return {id(holders[i]) for names, holders in pairs for i in holders if i != min(names)}

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give all holders of a parameter the sum of their gradients. Collective over the pipeline ranks.

        A missing gradient counts as zero; if all are missing, they stay missing. Gradients have to have their parameters'
        placements (`titanplans.split.gradients.align_gradients`), the same in all stages.
        """
        parameters = self.local_parameters()
        exist = [any(parameter.grad is not None for parameter in holders.values()) for holders in parameters]
        if self._group is not None and parameters:
            model = next(iter(self._models.values()))
            anywhere = torch.tensor(exist, dtype=torch.int32, device=next(model.parameters()).device)
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, self._group)
            exist = anywhere.tolist()
        for names, holders, exists in zip(self._names, parameters, exist, strict=True):
            if not holders or not exists:
                continue
            grads = {}
            for index, parameter in holders.items():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads[index] = local_of(parameter.grad)
            self._sum(list(names), grads)

    def _sum(self, stages: Sequence[int], grads: Mapping[int, torch.Tensor]) -> None:
        """Replace each gradient in `grads` (keyed by stage index) with the sum over all `stages` that hold the parameter."""
        like = next(iter(grads.values()))
        buffers = {i: grads[i].contiguous() if i in grads else torch.empty_like(like) for i in stages}
        elsewhere = {i: self._ranks[i] for i in stages if i not in grads}
        sends = [(dist.isend, buffers[i], rank) for i in grads for rank in dict.fromkeys(elsewhere.values())]
        receives = [(dist.irecv, buffers[i], rank) for i, rank in elsewhere.items()]
        operations = [
            dist.P2POp(op, buffer, group=self._group, group_peer=rank)
            for op, buffer, rank in sends + receives
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        # Sum in the order of the stages, so that all ranks get the same bits.
        total = torch.stack(list(buffers.values())).sum(0)
        for grad in grads.values():
            grad.copy_(total)
