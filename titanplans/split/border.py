"""The border between the residual stream and a region, on plain local tensors.

On the stream each tensor-parallel rank holds a shard of the sequence (sequence parallelism) or all of it. Inside of a region
every rank holds all of it and its shard of the heads or of the MLP width, and computes a partial sum of the region's output.
`enter` and `leave` cross the border; their backwards are each other's mirror image (Megatron-LM's f, g and their
sequence-parallel forms, Korthikanti et al. 2022, "Reducing Activation Recomputation", figure 5). The ends of the stream are
of the same kind:

    border            sequence parallel   forward          backward
    enter             yes                 all-gather       reduce-scatter
    enter             no                  identity         all-reduce
    leave             yes                 reduce-scatter   all-gather
    leave             no                  all-reduce       identity
    Stream.shard      yes                 own shard        all-gather
    Stream.full       yes                 all-gather       own shard
    either            no                  identity         identity

Tensors are local on both sides, so a Triton kernel may stand anywhere, and a compiled graph holds nothing but the collective
and its neighbours, which is what async tensor parallelism looks for.
"""

import copy
from typing import Any

import torch

from titanplans.split.collectives import Group, gather, group_of, scatter_sum, sum_gradients, sum_ranks
from titanplans.split.layout import StreamLayout
from titanplans.split.meshes import CutMeshes
from titanplans.split.own_tokens import OwnTokens
from titanplans.split.stream import Stream


class Border:
    """The border between the residual stream and the regions of one model.

    With B sequences of L tokens, hidden size D and N tensor-parallel ranks, the stream's local tensor is [B, L, D], or
    [B, L / N, D] if the sequence is sharded (`StreamLayout`). Inside a region it is [B, L, D]. With context parallelism a
    rank's tokens are taken first, and L is their number.

    Args:
        meshes: of the ranks that split a layer. `mesh` is the tensor-parallel one, 1-D; None: weights are not split.
        layout: of the stream.
    """

    def __init__(self, meshes: CutMeshes, layout: StreamLayout):
        self.meshes, self.mesh = meshes, meshes.tp
        self.group: Group = ("", 1) if meshes.tp is None else group_of(meshes.tp)
        self.rank = 0 if meshes.tp is None else meshes.tp.get_local_rank()
        self.tokens = OwnTokens(meshes.cp, layout.sequence_dim)
        self.stream = Stream(layout, self.group, self.rank, self.tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Border":
        """A copied model has a stream of its own, on the same mesh."""
        twin = memo[id(self)] = copy.copy(self)
        twin.stream = copy.deepcopy(self.stream, memo)
        return twin

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Bring the stream's local tensor `x` [B, L / N, D] into a region: return [B, L, D] on every rank.

        Each rank's gradient of the result is partial, since it has seen its shard of the heads alone; the backward sums them
        and lays the sum out as the stream.
        """
        if (dim := self.stream.dim) is None:
            return Border.enter_full(self, x)  # in high precision: not Float8Border's
        self.stream.check_runs()
        return gather(x, dim, x.shape[dim] * self.group[1], self.group)

    def enter_full(self, x: torch.Tensor) -> torch.Tensor:
        """Bring `x` [B, L, D], the same on every rank, into a region, also after the stream has ended."""
        return x if self.mesh is None else sum_gradients(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the partial results `x` [B, L, D] of a region over the ranks: return this rank's shard [B, L / N, D]."""
        if (dim := self.stream.dim) is None:
            return x if self.mesh is None else sum_ranks(x, self.group)
        return scatter_sum(x, dim, self.group)

    def enter_plainly(self, x: torch.Tensor) -> torch.Tensor:
        """Enter in high precision, also at a border where `enter` casts to float8."""
        return Border.enter(self, x)

    def leave_plainly(self, x: torch.Tensor) -> torch.Tensor:
        """Leave so that gradients come back in high precision."""
        return Border.leave(self, x)
