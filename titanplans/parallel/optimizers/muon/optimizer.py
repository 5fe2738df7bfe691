"""Muon for the matrices of a model, however they are sharded: torch.optim.Muon's update, of whole matrices.

The momentum is sharded as its parameter is. In a step each rank updates its part of the momentum; the matrices are made
whole, orthogonalised once each, and sent back (`exchange`). So the update is the same at any degree of any parallelism.
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
    """Momentum, orthogonalised, with decoupled weight decay.

    Collective: each rank of the parameters' meshes calls `step`, with gradients of the same parameters.

    Args:
        params: parameters, or groups of them: matrices [rows, columns], or stacks [matrices, rows, columns], each matrix of
            which is orthogonalised by itself. DTensors of any Shard and Replicate placements, or plain tensors.
        lr: learning rate; `weight_decay` is multiplied by it, as AdamW's is.
        momentum: share of the momentum that a step keeps.
        nesterov: look one step ahead, as Nesterov's momentum does.
        ns_steps: steps of the Newton-Schulz iteration.
        adjust_lr_fn: the factor of the update of a matrix [A, B]: "match_rms_adamw", 0.2 sqrt(max(A, B)), by which it is as
            large as AdamW's (arxiv.org/abs/2502.16982), or "original", sqrt(max(1, A / B)).
        sections: of the parameters that hold several matrices side by side, which are orthogonalised one by one.
        replicas: 1-D mesh of ranks that each have all of the plain tensors, and share the work; None: this rank alone.

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
        self._dealt: list[tuple[Exchange, list[Round]]] | None = None
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
        if self._dealt is None:
            self._dealt = self._deal_out(params)
        for exchange, rounds in self._dealt:
            trained = [{p: s for p, s in r.items() if params[s.index].grad is not None} for r in rounds]
            self._run(exchange, [part for part in trained if part], members)
        return loss

    def _deal_out(self, params: list[torch.Tensor]) -> list[tuple[Exchange, list[Round]]]:
        """Return who makes what whole, by mesh."""
        by_mesh: dict[DeviceMesh | None, dict[int, tuple[tuple[int, ...], Placements]]] = {}
        for index, param in enumerate(params):
            sharded = isinstance(param, DTensor)
            mesh = param.device_mesh if sharded else self._replicas
            placements = tuple(param.placements) if sharded else (Replicate(),)
            by_mesh.setdefault(mesh, {})[index] = tuple(param.shape), placements
        return [
            (Exchange(mesh), rounds_of(found, 1 if mesh is None else mesh.size()))
            for mesh, found in by_mesh.items()
        ]

    def _run(self, exchange: Exchange, rounds: list[Round], members: list["_Member"]) -> None:
        begun = self._begin(exchange, rounds, members)
        # The shards of a round are on their way while those of the round before are computed.
        for part, updates, gathering in _one_ahead(begun) if exchange.size > 1 else begun:
            mine, whole = part.get(exchange.me), gathering.whole()
            if mine is not None and whole is not None:
                whole = self._orthogonal(whole, *members[mine.index])
            boxes = {share.index: exchange.held(share) for share in part.values()}
            for share, piece in exchange.scatter(part, whole):
                view(updates[share.index], boxes[share.index], exchange.own(share)).copy_(piece)
            for index, update in updates.items():
                self._apply(*members[index], update, boxes[index])

    def _begin(self, exchange: Exchange, rounds: list[Round], members: list["_Member"]) -> Iterator["_Begun"]:
        for part in rounds:
            indices = dict.fromkeys(share.index for share in part.values())
            directions = {index: self._direction(*members[index]) for index in indices}
            yield part, directions, exchange.gather(part, directions)

    def _direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum of `param`; return this rank's part of the matrix to orthogonalise, a new tensor."""
        grad, state = param.grad, self.state[param]
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        local, momentum = local_of(grad), local_of(state["momentum_buffer"])
        momentum.lerp_(local, 1 - group["momentum"])
        return local.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()

    def _orthogonal(self, whole: torch.Tensor, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        steps, sections = group["ns_steps"], self.sections.get(param)
        if sections is None:
            return orthogonalize(whole, steps)
        parts = whole.split(sections.sizes, sections.dim)
        return torch.cat([orthogonalize(part, steps) for part in parts], sections.dim)

    def _apply(self, param: torch.Tensor, group: dict[str, Any], update: torch.Tensor, held: Box) -> None:
        """Decay this rank's part of `param`, `held` of it, and subtract the update."""
        scale, sections = SCALES[group["adjust_lr_fn"]], self.sections.get(param)
        shape = list(param.shape)
        dim, sizes = (param.ndim - 1, (shape[-1],)) if sections is None else sections
        first, last = held[dim][0], sum(held[dim])
        at = 0
        for size in sizes:
            shape[dim] = size
            begin, end = max(at, first), min(at + size, last)
            if begin < end:
                update.narrow(dim, begin - first, end - begin).mul_(scale(*shape[-2:]))
            at += size
        local, lr = local_of(param), float(group["lr"])
        local.mul_(1 - lr * group["weight_decay"])
        local.add_(update, alpha=-lr)


_Member = tuple[torch.Tensor, dict[str, Any]]
"""A parameter and its group."""
_Begun = tuple[Round, dict[int, torch.Tensor], Gathering]
"""A round, this rank's parts of its parameters' directions, and the shards on their way."""


def _one_ahead(begun: Iterator[_Begun]) -> Iterator[_Begun]:
    """Yield each when the next has begun."""
    before = next(begun, None)
    for each in begun:
        assert before is not None
        yield before
        before = each
    if before is not None:
        yield before
