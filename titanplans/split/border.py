"""The border between the residual stream and a region, on plain local tensors.

On the stream each tensor-parallel rank holds a shard of the sequence (sequence parallelism) or all of it. Inside a region
every rank holds the full sequence and its shard of the heads or of the MLP width, and computes a partial sum of the
region's output. `enter` and `leave` cross the border, and each is the other's backward (Megatron-LM's f and g and their
sequence-parallel forms, Korthikanti et al. 2022, "Reducing Activation Recomputation", figure 5). `Stream.shard` and
`Stream.full` begin and end the stream:

    function          sequence parallel   forward          backward
    enter             yes                 all-gather       reduce-scatter
    enter             no                  identity         all-reduce
    leave             yes                 reduce-scatter   all-gather
    leave             no                  all-reduce       identity
    Stream.shard      yes                 local shard      all-gather
    Stream.full       yes                 all-gather       local shard
    shard and full    no                  identity         identity

Tensors are plain local tensors on both sides, so Triton kernels accept them. In a compiled graph the collective stands
directly next to the matrix product: torch's async tensor parallelism fuses this pattern.
"""

import copy
from typing import Any

import torch

from titanplans.split.collectives import Group, gather, group_of, scatter_sum, sum_gradients, sum_ranks
from titanplans.split.layout import StreamLayout
from titanplans.split.local_tokens import LocalTokens
from titanplans.split.meshes import SplitMeshes
from titanplans.split.stream import Stream


class Border:
    """The border between the residual stream and the regions of one model.

    With B sequences of L tokens, hidden size D and N tensor-parallel ranks, the stream's local tensor is [B, L, D], or
    [B, L / N, D] if the sequence is sharded (`StreamLayout`). Inside a region it is [B, L, D]. Under context
    parallelism L counts only the tokens of this CP rank.

    Args:
        meshes: the meshes of the ranks that split a layer. `mesh` is the 1-D tensor-parallel mesh; None: weights are not
            split.
        layout: the stream's layout.
    """

    def __init__(self, meshes: SplitMeshes, layout: StreamLayout):
        self.meshes, self.mesh = meshes, meshes.tp
        self.group: Group = ("", 1) if meshes.tp is None else group_of(meshes.tp)
        self.rank = 0 if meshes.tp is None else meshes.tp.get_local_rank()
        self.tokens = LocalTokens(meshes.cp, layout.sequence_dim)
        self.stream = Stream(layout, self.group, self.rank, self.tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Border":
        """Give a copied model its own stream, on the same mesh."""
        twin = memo[id(self)] = copy.copy(self)
        twin.stream = copy.deepcopy(self.stream, memo)
        return twin

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Bring the stream's local tensor `x` [B, L / N, D] into a region: return [B, L, D] on every rank.

        The gradient of the result is partial, since each rank's backward covers only its heads. The backward sums it
        over the ranks and shards the sum as the stream is sharded.
        """
        if (dim := self.stream.dim) is None:
            return Border.enter_full(self, x)  # not `self.enter_full`: Float8Border's would cast to float8
        self.stream.check_runs()
        return gather(x, dim, x.shape[dim] * self.group[1], self.group)

    def enter_full(self, x: torch.Tensor) -> torch.Tensor:
        """Bring `x` [B, L, D], the same on every rank, into a region; also after the stream has ended."""
        return x if self.mesh is None else sum_gradients(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a region's partial results `x` [B, L, D] over the ranks: return this rank's shard [B, L / N, D]."""
        if (dim := self.stream.dim) is None:
            return x if self.mesh is None else sum_ranks(x, self.group)
        return scatter_sum(x, dim, self.group)

    def enter_in_high_precision(self, x: torch.Tensor) -> torch.Tensor:
        """Enter without a cast to float8, even if `enter` of a subclass casts."""
        return Border.enter(self, x)

    def leave_in_high_precision(self, x: torch.Tensor) -> torch.Tensor:
        """Leave so that gradients return in high precision, even if `leave` of a subclass casts them to float8."""
        return Border.leave(self, x)
