"""The communication of Muon's step: gather each matrix on one rank, its owner, and scatter the result.

In a round each rank of a mesh owns at most one matrix. One all-to-all sends all shards of a round's matrices to their
owners, another one sends the results back. So a rank holds one or two full matrices at a time, the computation is
distributed, and each rank sends and receives about the size of its shards, in bfloat16, the dtype of Muon's products.

A stack of matrices (experts) is distributed in blocks of matrices. If the stack is sharded by expert over all ranks,
nothing is sent.
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
"""A rectangular part of a tensor, as (first index, size) for each dimension."""
Placements = tuple[Placement, ...]


class Assignment(NamedTuple):
    """The matrices of one parameter that one rank (their owner) gathers and orthogonalises in a round."""

    index: int
    """The parameter's index."""
    shape: tuple[int, ...]
    """The parameter's full shape."""
    placements: Placements
    box: Box
    """The assigned part of the parameter: all of a matrix, some matrices of a stack."""


Round = dict[int, Assignment]
"""The assignments that are gathered at the same time. Keys are the owners' positions in the flattened mesh."""


def rounds_of(parameters: Mapping[int, tuple[tuple[int, ...], Placements]], ranks: int) -> list[Round]:
    """Assign parameters, given by full shape and placements, to the ranks of a mesh.

    A stack takes one round, in which each rank gets a block of matrices. Single matrices are assigned in order of cost, the
    costliest first, so that the matrices of a round cost about the same.
    """
    rounds: list[Round] = []
    single = []
    for index, (shape, placements) in parameters.items():
        full_box = tuple((0, size) for size in shape)
        if len(shape) == 2:
            single.append(Assignment(index, shape, placements, full_box))
            continue
        blocks = ((rank, _chunk(shape[0], ranks, rank)) for rank in range(ranks))
        rounds.append(
            {
                rank: Assignment(index, shape, placements, (block, *full_box[1:]))
                for rank, block in blocks
                if block[1]
            }
        )
    # The sort is stable, so its result is the same on all ranks.
    single.sort(key=lambda matrix: -(min(matrix.shape) ** 2) * max(matrix.shape))
    return rounds + [dict(enumerate(single[i : i + ranks])) for i in range(0, len(single), ranks)]


class Exchange:
    """The all-to-alls of the ranks of one mesh. Every rank takes part in every call.

    Args:
        mesh: the mesh of the parameters; None: this rank has full parameters, and sends nothing.
    """

    def __init__(self, mesh: DeviceMesh | None):
        self.mesh = mesh
        self._shard_boxes: dict[tuple[tuple[int, ...], Placements, int], Box] = {}
        # Under CPU offload the shards are on another device than collectives and products.
        self._device = None if mesh is None else torch.empty(0, device=mesh.device_type).device
        if mesh is None or mesh.size() == 1:
            self.size, self.me, self._sizes = 1, 0, (1,) * (1 if mesh is None else mesh.ndim)
            return
        ranks: list[int] = mesh.mesh.flatten().tolist()
        self._group = _group_of(mesh)
        self.size, self.me, self._sizes = len(ranks), ranks.index(dist.get_rank()), tuple(mesh.shape)
        positions = {dist.get_group_rank(self._group, rank): p for p, rank in enumerate(ranks)}
        # The mesh position of each rank of the group, which may order ranks differently.
        self._order = [positions[rank] for rank in range(self.size)]

    def shard_box(self, assignment: Assignment, position: int | None = None) -> Box:
        """Return the part of the parameter that the rank at `position` of the mesh, by default this rank, holds."""
        key = assignment.shape, assignment.placements, self.me if position is None else position
        if key not in self._shard_boxes:
            box, coordinate = [(0, size) for size in assignment.shape], self._coordinate(key[2])
            axes = (
                [] if self.mesh is None else sharding_axes(self.mesh, assignment.placements, name="a matrix")
            )
            for axis, dim in axes:
                first, size = _chunk(box[dim][1], self._sizes[axis], coordinate[axis])
                box[dim] = box[dim][0] + first, size
            self._shard_boxes[key] = tuple(box)
        return self._shard_boxes[key]

    def overlap_box(self, assignment: Assignment, position: int | None = None) -> Box:
        """Return the part of `assignment.box` that the rank at `position` of the mesh, by default this rank, holds."""
        return tuple(map(_overlap, self.shard_box(assignment, position), assignment.box))

    def gather(self, round_: Round, shards: Mapping[int, torch.Tensor]) -> "Gathering":
        """Start to send the shards of each assignment of a round to its owner.

        Args:
            round_: the round.
            shards: this rank's shard of each assigned parameter, by the parameter's index.
        """
        to = {}
        for owner, assignment in round_.items():
            if self.me in self._sources(assignment, owner):
                shard = view(
                    shards[assignment.index], self.shard_box(assignment), self.overlap_box(assignment)
                )
                to[owner] = shard.reshape(-1).to(self._device, torch.bfloat16)
        mine = round_.get(self.me)
        boxes = {p: self.overlap_box(mine, p) for p in self._sources(mine, self.me)} if mine else {}
        return Gathering(mine, boxes, *self._all_to_all(to, boxes))

    def scatter(self, round_: Round, full: torch.Tensor | None) -> Iterator[tuple[Assignment, torch.Tensor]]:
        """Send each owner's result to the other ranks; yield each assignment with this rank's shard of its result.

        Args:
            round_: the round.
            full: the result of this rank's assignment, if it has one.
        """
        mine = round_.get(self.me)
        to = {}
        if mine is not None and full is not None:
            to = {p: view(full, mine.box, self.overlap_box(mine, p)).reshape(-1) for p in range(self.size)}
        boxes = {owner: self.overlap_box(assignment) for owner, assignment in round_.items()}
        shards, work = self._all_to_all(to, boxes)
        if work is not None:
            work.wait()
        for owner, box in boxes.items():
            yield round_[owner], shards[owner].view([size for _, size in box])

    def _sources(self, assignment: Assignment, owner: int) -> list[int]:
        """Return the positions of the ranks that send to `owner`: only those of the replica that contains `owner`."""
        replicated = [
            axis for axis, placement in enumerate(assignment.placements) if isinstance(placement, Replicate)
        ]
        replica = [self._coordinate(owner)[axis] for axis in replicated]
        return [p for p in range(self.size) if [self._coordinate(p)[axis] for axis in replicated] == replica]

    def _all_to_all(
        self, to: Mapping[int, torch.Tensor], boxes: Mapping[int, Box]
    ) -> tuple[dict[int, torch.Tensor], Any]:
        """Send each flat tensor in `to` to the rank at its position; return the received tensors by position, and the
        work."""
        if self.size == 1:
            return dict(to), None
        empty = torch.empty(0, dtype=torch.bfloat16, device=self._device)
        sent = [to.get(position, empty) for position in self._order]
        sizes = [_numel(boxes[position]) if position in boxes else 0 for position in self._order]
        received = empty.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            received, torch.cat(sent), sizes, [shard.numel() for shard in sent], self._group, async_op=True
        )
        return dict(zip(self._order, received.split(sizes), strict=True)), work

    def _coordinate(self, position: int) -> tuple[int, ...]:
        """Return the coordinate in the mesh of a position in the flattened mesh."""
        coordinate = []
        for size in reversed(self._sizes):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))


class Gathering:
    """A running all-to-all that gathers this rank's assignment."""

    def __init__(
        self,
        assignment: Assignment | None,
        boxes: Mapping[int, Box],
        shards: Mapping[int, torch.Tensor],
        work: Any,
    ):
        self._assignment, self._boxes, self._shards, self._work = assignment, boxes, shards, work

    def wait(self) -> torch.Tensor | None:
        """Wait, and return the gathered assignment in bfloat16; None if this rank has none in this round."""
        if self._work is not None:
            self._work.wait()
        if self._assignment is None:
            return None
        full = next(iter(self._shards.values())).new_empty([size for _, size in self._assignment.box])
        for position, box in self._boxes.items():
            shard = self._shards[position].view([size for _, size in box])
            view(full, self._assignment.box, box).copy_(shard)
        return full


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is not None and mesh.size() == dist.get_world_size():
        return world  # another group of the same ranks would cost memory
    flat = (
        mesh if mesh.ndim == 1 else flatten_mesh(mesh, "muon_" + "_".join(mesh.mesh_dim_names or ("mesh",)))
    )
    return flat.get_group()


def view(tensor: torch.Tensor, origin: Box, box: Box) -> torch.Tensor:
    """Return a view of the values at `box` in `tensor`, which has the values at `origin`.

    Both boxes are positions in one larger tensor, of which `tensor` is a rectangular part.
    """
    for dim, ((start, _), (first, size)) in enumerate(zip(origin, box, strict=True)):
        tensor = tensor.narrow(dim, first - start if size else 0, size)
    return tensor


def _chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (first index, size) of the chunk of `rank`, as `torch.chunk` splits a dimension of `size`."""
    each = -(-size // ranks)
    first = min(rank * each, size)
    return first, min(each, size - first)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    first = max(one[0], other[0])
    return first, max(0, min(sum(one), sum(other)) - first)


def _numel(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(size for _, size in box)
