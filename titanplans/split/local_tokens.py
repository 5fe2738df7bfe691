"""The local tokens of a context-parallel rank: [B, L / c, H] of a sequence [B, L, H] over c ranks.

Every gradient is partial over these ranks, since each rank's backward covers only its tokens or its heads. So taking the
local tokens out of a replicated tensor needs no collective in the backward, and the backward of a gather is a
reduce-scatter.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanplans.errors import PlanError
from titanplans.split.collectives import Group, all_reduce, gather, group_of, scatter_sum
from titanplans.split.layout import shard_size
from titanplans.text import user_line


class GatherPermission(NamedTuple):
    """Whether a plan permits code to gather all tokens of hidden states, and the facts for the error if it does not."""

    granted: bool
    remedy: str
    """The style that would permit it."""
    key: str = ""
    """The plan key of that style."""
    source: str = ""
    """The token-wise module that returned the sequence; "" if the sequence is the region's input."""

    def check(self, function: str) -> None:
        """Refuse a function that needs the tokens of other ranks, unless the plan permits to gather them.

        Raises:
            PlanError: names the function, the user's line and the style to use.
        """
        if not self.granted:
            what = f"output of {self.source}" if self.source else f"hidden states at {self.key}"
            split = (
                f"{self.source} a style that splits it by heads, such as colwise(), or "
                if self.source
                else ""
            )
            raise PlanError(
                f"{function}{user_line()} needs all tokens of the {what}, but a context-parallel rank has only its "
                f"own tokens: give {split}{self.key} the style {self.remedy}, or set context_parallel_degree = 1"
            )


class LocalTokens:
    """The local tokens of this rank on a 1-D mesh of context parallelism.

    Args:
        mesh: the context-parallel ranks; None: this rank has all tokens.
        dim: the sequence dimension of the hidden states [..., sequence, hidden].
    """

    def __init__(self, mesh: DeviceMesh | None, dim: int):
        self.mesh, self.dim = mesh, dim
        self.group: Group = ("", 1) if mesh is None else group_of(mesh)
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.permission = GatherPermission(False, "")
        """The permission of the latest region that mixes tokens."""
        self.region_shape = torch.Size()
        """The shape of the full sequence in the latest region that mixes tokens; empty if its forward runs in full."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalTokens":
        return self  # a mesh can't be copied, and the plan's local functions have to use the same object

    @property
    def ranks(self) -> int:
        """The number of context-parallel ranks."""
        return self.group[1]

    def take_local(self, x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Return this rank's tokens of `x`, which is replicated or a `ShardedSequence`.

        If the number of ranks does not divide the length, the last ranks have fewer tokens. This happens at the head,
        after a forward in full.

        Args:
            x: has the tokens in dimension `dim`.
            dim: the tokens' dimension. None: the sequence dimension of hidden states.
        """
        if self.ranks == 1:
            return x
        if (shard := getattr(x, "shard", None)) is not None:
            return shard
        dim = self.dim if dim is None else dim
        length = x.shape[dim]
        size = shard_size(length, self.ranks)
        first = min(self.rank * size, length)
        return x.narrow(dim, first, min(size, length - first))

    def full_shape(self, shard: torch.Tensor) -> list[int]:
        """Return the shape of the full sequence whose local tokens are `shard`."""
        shape = list(shard.shape)
        shape[self.dim] *= self.ranks
        return shape

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the ranks' tokens `x` to the full sequence; its gradient is partial, and is reduce-scattered."""
        return x if self.ranks == 1 else gather(x, self.dim, x.shape[self.dim] * self.ranks, self.group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' full sequences `x`, and return this rank's tokens of the sum."""
        return x if self.ranks == 1 else scatter_sum(x, self.dim, self.group)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x`, losses of local tokens or full sequences, over the ranks, without a gradient."""
        return x if self.ranks == 1 else all_reduce(x, self.group)
