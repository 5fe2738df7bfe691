"""Muon for sharded matrices: the update of torch.optim.Muon, computed from full matrices.

The momentum has the sharding of its parameter. In a step each rank updates its shard of the momentum; each matrix is
gathered on one rank, orthogonalised there, and the result is scattered (`exchange`). So the update does not depend on how
the model is parallelised.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from titanplans.errors import ParallelError
from titanplans.parallel.optimizers.muon.exchange import (
    Box,
    Exchange,
    Gathering,
    Placements,
    Round,
    rounds_of,
    view,
)
from titanplans.parallel.optimizers.muon.orthogonal import SCALES, orthogonalize
from titanplans.parallel.optimizers.roles import Sections
from titanplans.split.gradients import align_gradients, local_of


class Muon(torch.optim.Optimizer):
    """Muon (orthogonalised momentum) with decoupled weight decay, for DTensors with any sharding.

    `step` is collective: each rank of the parameters' meshes calls it, with gradients of the same parameters.

    Args:
        params: parameters, or groups of them: matrices [rows, columns], or stacks [matrices, rows, columns], whose
            matrices are orthogonalised one by one. DTensors of any Shard and Replicate placements, or plain tensors.
        lr: learning rate; `weight_decay` is multiplied by `lr`, as in AdamW.
        momentum: decay rate of the momentum.
        nesterov: use Nesterov's momentum.
        ns_steps: steps of the Newton-Schulz iteration.
        adjust_lr_fn: the factor of the update of a matrix [A, B]: "match_rms_adamw", 0.2 sqrt(max(A, B)), which matches the
            RMS of AdamW's update (arxiv.org/abs/2502.16982), or "original", sqrt(max(1, A / B)).
        sections: the sections of parameters that pack several matrices, which are orthogonalised one by one.
        replicas: 1-D mesh of ranks that all have the same plain tensors; the updates of these tensors are distributed over
            the ranks. None: this rank computes all updates of plain tensors.

    Raises:
        ParallelError: a parameter is neither a matrix nor a stack of them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 8e-4,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        *,
        sections: Mapping[torch.Tensor, Sections] | None = None,
        replicas: DeviceMesh | None = None,
    ):
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        self.sections, self._replicas = dict(sections or {}), replicas
        self._schedule: list[tuple[Exchange, list[Round]]] | None = None
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.ndim not in (2, 3):
                raise ParallelError(
                    f"Muon takes matrices [rows, columns] and stacks of them, not a parameter of the shape "
                    f"{tuple(param.shape)}: give it to AdamW"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members: list[_Member] = [(param, group) for group in self.param_groups for param in group["params"]]
        params = [param for param, _ in members]
        align_gradients(params)
        if self._schedule is None:
            self._schedule = self._make_schedule(params)
        for exchange, rounds in self._schedule:
            with_gradients = [
                {p: s for p, s in r.items() if params[s.index].grad is not None} for r in rounds
            ]
            self._run(exchange, [round_ for round_ in with_gradients if round_], members)
        return loss

    def _make_schedule(self, params: list[torch.Tensor]) -> list[tuple[Exchange, list[Round]]]:
        """Return for each mesh the rounds, which assign each matrix to the rank that orthogonalises it."""
        by_mesh: dict[DeviceMesh | None, dict[int, tuple[tuple[int, ...], Placements]]] = {}
        for index, param in enumerate(params):
            sharded = isinstance(param, DTensor)
            mesh = param.device_mesh if sharded else self._replicas
            placements = tuple(param.placements) if sharded else (Replicate(),)
            by_mesh.setdefault(mesh, {})[index] = tuple(param.shape), placements
        return [
            (Exchange(mesh), rounds_of(parameters, 1 if mesh is None else mesh.size()))
            for mesh, parameters in by_mesh.items()
        ]

    def _run(self, exchange: Exchange, rounds: list[Round], members: list["_Member"]) -> None:
        started = self._start(exchange, rounds, members)
        # The next round's shards are sent while the matrices of this round are orthogonalised.
        for round_, updates, gathering in _one_ahead(started) if exchange.size > 1 else started:
            assignment, full = round_.get(exchange.me), gathering.wait()
            if assignment is not None and full is not None:
                full = self._orthogonal(full, *members[assignment.index])
            boxes = {each.index: exchange.shard_box(each) for each in round_.values()}
            for each, shard in exchange.scatter(round_, full):
                view(updates[each.index], boxes[each.index], exchange.overlap_box(each)).copy_(shard)
            for index, update in updates.items():
                self._apply(*members[index], update, boxes[index])

    def _start(
        self, exchange: Exchange, rounds: list[Round], members: list["_Member"]
    ) -> Iterator["_StartedRound"]:
        for round_ in rounds:
            indices = dict.fromkeys(assignment.index for assignment in round_.values())
            directions = {index: self._direction(*members[index]) for index in indices}
            yield round_, directions, exchange.gather(round_, directions)

    def _direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum of `param`; return this rank's shard of the matrix to orthogonalise, a new tensor."""
        grad, state = param.grad, self.state[param]
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        local, momentum = local_of(grad), local_of(state["momentum_buffer"])
        momentum.lerp_(local, 1 - group["momentum"])
        return local.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()

    def _orthogonal(self, full: torch.Tensor, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        steps, sections = group["ns_steps"], self.sections.get(param)
        if sections is None:
            return orthogonalize(full, steps)
        matrices = full.split(sections.sizes, sections.dim)
        return torch.cat([orthogonalize(matrix, steps) for matrix in matrices], sections.dim)

    def _apply(self, param: torch.Tensor, group: dict[str, Any], update: torch.Tensor, box: Box) -> None:
        """Apply weight decay and the scaled update to this rank's shard of `param`; `box` is the shard's position in
        `param`."""
        scale, sections = SCALES[group["adjust_lr_fn"]], self.sections.get(param)
        shape = list(param.shape)
        dim, sizes = (param.ndim - 1, (shape[-1],)) if sections is None else sections
        first, last = box[dim][0], sum(box[dim])
        start = 0
        # The scale depends on the shape of each packed matrix.
        for size in sizes:
            shape[dim] = size
            begin, end = max(start, first), min(start + size, last)
            if begin < end:
                update.narrow(dim, begin - first, end - begin).mul_(scale(*shape[-2:]))
            start += size
        local, lr = local_of(param), float(group["lr"])
        local.mul_(1 - lr * group["weight_decay"])
        local.add_(update, alpha=-lr)


_Member = tuple[torch.Tensor, dict[str, Any]]
"""A parameter and its group."""
_StartedRound = tuple[Round, dict[int, torch.Tensor], Gathering]
"""A round, this rank's shards of its parameters' directions, and the running gather."""


def _one_ahead(rounds: Iterator[_StartedRound]) -> Iterator[_StartedRound]:
    """Yield each round after the next one has been started."""
    previous = next(rounds, None)
    for current in rounds:
        assert previous is not None
        yield previous
        previous = current
    if previous is not None:
        yield previous
