"""Whole matrices out of their shards, each on one rank, and back: the communication of a step of Muon.

The ranks of a mesh take turns at owning matrices: in a round each rank owns one. All shards of a matrix go to its owner by
one all-to-all, and the owner's result goes back by another. So no rank holds more than a matrix or two, the work is
shared, and each rank sends and gets about as much as its shards, in bfloat16, which Muon's products are computed in.

A stack of matrices (experts) is dealt out in blocks. Where it is sharded by expert over all ranks, nothing is sent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from titanplans.split.parameters.shards import sharding_axes
from titanplans.torch_private.dtensor import flatten_mesh

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: of each dimension the first index, and how many."""
Placements = tuple[Placement, ...]


class MatrixShare(NamedTuple):
    """What one rank makes whole in a round: some or all matrices of one parameter."""

    index: int
    """Which parameter it is of."""
    shape: tuple[int, ...]
    """The parameter's."""
    placements: Placements
    box: Box
    """Its part of the parameter: the whole, except of a stack."""


Round = dict[int, MatrixShare]
"""The matrices that are gathered at the same time, by their owner's place in the mesh."""


def rounds_of(parameters: Mapping[int, tuple[tuple[int, ...], Placements]], ranks: int) -> list[Round]:
    """Deal parameters out to the ranks of a mesh, by their shapes and placements.

    A stack is one round, in blocks; single matrices are dealt out from the costliest on.
    """
    rounds: list[Round] = []
    single = []
    for index, (shape, placements) in parameters.items():
        whole = tuple((0, size) for size in shape)
        if len(shape) == 2:
            single.append(MatrixShare(index, shape, placements, whole))
            continue
        blocks = ((rank, _chunk(shape[0], ranks, rank)) for rank in range(ranks))
        rounds.append(
            {p: MatrixShare(index, shape, placements, (block, *whole[1:])) for p, block in blocks if block[1]}
        )
    single.sort(key=lambda share: -(min(share.shape) ** 2) * max(share.shape))  # stable: alike on all ranks
    return rounds + [dict(enumerate(single[at : at + ranks])) for at in range(0, len(single), ranks)]


class Exchange:
    """The all-to-alls of the ranks of one mesh. Every rank takes part in every call.

    Args:
        mesh: that the parameters lie on; None: this rank has them whole, and sends nothing.
    """

    def __init__(self, mesh: DeviceMesh | None):
        self.mesh = mesh
        self._held: dict[tuple[tuple[int, ...], Placements, int], Box] = {}
        # Under CPU offload shards lie elsewhere than collectives and products.
        self._device = None if mesh is None else torch.empty(0, device=mesh.device_type).device
        if mesh is None or mesh.size() == 1:
            self.size, self.me, self._sizes = 1, 0, (1,) * (1 if mesh is None else mesh.ndim)
            return
        ranks: list[int] = mesh.mesh.flatten().tolist()
        self._group = _group_of(mesh)
        self.size, self.me, self._sizes = len(ranks), ranks.index(dist.get_rank()), tuple(mesh.shape)
        places = {dist.get_group_rank(self._group, rank): place for place, rank in enumerate(ranks)}
        self._order = [places[rank] for rank in range(self.size)]  # the mesh may count ranks otherwise

    def held(self, share: MatrixShare, place: int | None = None) -> Box:
        """Return the box of a share's parameter that the rank at `place` of the mesh, or this one, holds."""
        key = share.shape, share.placements, self.me if place is None else place
        if key not in self._held:
            box, at = [(0, size) for size in share.shape], self._at(key[2])
            cuts = [] if self.mesh is None else sharding_axes(self.mesh, share.placements, name="a matrix")
            for axis, dim in cuts:
                first, size = _chunk(box[dim][1], self._sizes[axis], at[axis])
                box[dim] = box[dim][0] + first, size
            self._held[key] = tuple(box)
        return self._held[key]

    def own(self, share: MatrixShare, place: int | None = None) -> Box:
        """Return the box of a share that the rank at `place` of the mesh, or this one, holds."""
        return tuple(map(_overlap, self.held(share, place), share.box))

    def gather(self, part: Round, pieces: Mapping[int, torch.Tensor]) -> "Gathering":
        """Begin to send each share of a round to its owner.

        Args:
            part: the round.
            pieces: this rank's shard of each share's parameter, by the parameter's index.
        """
        to = {}
        for owner, share in part.items():
            if self.me in self._sources(share, owner):
                piece = view(pieces[share.index], self.held(share), self.own(share))
                to[owner] = piece.reshape(-1).to(self._device, torch.bfloat16)
        mine = part.get(self.me)
        boxes = {p: self.own(mine, p) for p in self._sources(mine, self.me)} if mine else {}
        return Gathering(mine, boxes, *self._all_to_all(to, boxes))

    def scatter(self, part: Round, whole: torch.Tensor | None) -> Iterator[tuple[MatrixShare, torch.Tensor]]:
        """Send each owner's result back; yield this rank's part of each share, with that share.

        Args:
            part: the round.
            whole: this rank's share, if it owns one.
        """
        mine = part.get(self.me)
        to = {}
        if mine is not None and whole is not None:
            to = {p: view(whole, mine.box, self.own(mine, p)).reshape(-1) for p in range(self.size)}
        boxes = {owner: self.own(share) for owner, share in part.items()}
        parts, work = self._all_to_all(to, boxes)
        if work is not None:
            work.wait()
        for owner, box in boxes.items():
            yield part[owner], parts[owner].view([size for _, size in box])

    def _sources(self, share: MatrixShare, owner: int) -> list[int]:
        """Return which ranks send to the owner: of those that hold copies the ones on its own side."""
        copies = [axis for axis, placement in enumerate(share.placements) if isinstance(placement, Replicate)]
        side = [self._at(owner)[axis] for axis in copies]
        return [p for p in range(self.size) if [self._at(p)[axis] for axis in copies] == side]

    def _all_to_all(
        self, to: Mapping[int, torch.Tensor], boxes: Mapping[int, Box]
    ) -> tuple[dict[int, torch.Tensor], Any]:
        """Send a flat tensor to each rank; return the received ones, each the numbers of a box, and the work to wait for."""
        if self.size == 1:
            return dict(to), None
        empty = torch.empty(0, dtype=torch.bfloat16, device=self._device)
        sent = [to.get(place, empty) for place in self._order]
        sizes = [_count(boxes[place]) if place in boxes else 0 for place in self._order]
        received = empty.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            received, torch.cat(sent), sizes, [part.numel() for part in sent], self._group, async_op=True
        )
        return dict(zip(self._order, received.split(sizes), strict=True)), work

    def _at(self, place: int) -> tuple[int, ...]:
        at = []
        for size in reversed(self._sizes):
            place, index = divmod(place, size)
            at.append(index)
        return tuple(reversed(at))


class Gathering:
    """Shards on their way to this rank."""

    def __init__(
        self, mine: MatrixShare | None, boxes: Mapping[int, Box], parts: Mapping[int, torch.Tensor], work: Any
    ):
        self._mine, self._boxes, self._parts, self._work = mine, boxes, parts, work

    def whole(self) -> torch.Tensor | None:
        """Wait, and return this rank's share, in bfloat16; None if it owns none in this round."""
        if self._work is not None:
            self._work.wait()
        if self._mine is None:
            return None
        whole = next(iter(self._parts.values())).new_empty([size for _, size in self._mine.box])
        for place, box in self._boxes.items():
            view(whole, self._mine.box, box).copy_(self._parts[place].view([size for _, size in box]))
        return whole


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is not None and mesh.size() == dist.get_world_size():
        return world  # a group of its own for the same ranks would cost memory
    flat = (
        mesh if mesh.ndim == 1 else flatten_mesh(mesh, "muon_" + "_".join(mesh.mesh_dim_names or ("mesh",)))
    )
    return flat.get_group()


def view(tensor: torch.Tensor, origin: Box, box: Box) -> torch.Tensor:
    """Return the part `box` of `tensor`, which is itself the part `origin` of a larger one."""
    for dim, ((start, _), (first, size)) in enumerate(zip(origin, box, strict=True)):
        tensor = tensor.narrow(dim, first - start if size else 0, size)
    return tensor


def _chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return which part of `size` the rank has by `torch.chunk`."""
    each = -(-size // ranks)
    first = min(rank * each, size)
    return first, min(each, size - first)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    first = max(one[0], other[0])
    return first, max(0, min(sum(one), sum(other)) - first)


def _count(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(size for _, size in box)
