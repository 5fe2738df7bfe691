"""A rank's own tokens, [B, ceil(L / c), H] of a sequence [B, L, H] over c ranks; the last ranks' are filled up with zeros.

Every gradient over these ranks is a part: each rank has followed its own tokens, or its own heads, to the loss. So to take
one's tokens out of what every rank has takes no collective in the backward, and to gather them sums the parts.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanplans.split.collectives import Group, all_reduce, gather, group_of, scatter_sum
from titanplans.split.layout import shard_size


class OwnTokens:
    """The tokens of this rank among those of a 1-D mesh of context parallelism.

    Args:
        mesh: of the ranks that share a sequence; None: this rank has all tokens.
        dim: the dimension of the hidden states [..., sequence, hidden] that is the sequence.
    """

    def __init__(self, mesh: DeviceMesh | None, dim: int):
        self.mesh, self.dim = mesh, dim
        self.group: Group = ("", 1) if mesh is None else group_of(mesh)
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.region_shape = torch.Size()
        """The shape of the sequence in the newest region that mixes tokens, at whatever border."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnTokens":
        return self  # of a mesh, which is not copied; a plan's functions hold it, too, and run in the same forward

    @property
    def ranks(self) -> int:
        """The number of ranks that share a sequence."""
        return self.group[1]

    def number(self, length: int) -> int:
        """Return how many tokens of a sequence of `length` are this rank's, without those that fill up."""
        size = shard_size(length, self.ranks)
        return max(0, min(size, length - self.rank * size))

    def own(self, x: torch.Tensor, fill: int = 0, dim: int | None = None) -> torch.Tensor:
        """Return this rank's tokens of `x`, which every rank has, or which is a `ShardedSequence`.

        `dim`: of the tokens, where it is not that of hidden states.
        """
        if self.ranks == 1:
            return x
        if (shard := getattr(x, "shard", None)) is not None:
            return shard
        dim = self.dim if dim is None else dim
        length = x.shape[dim]
        size, number = shard_size(length, self.ranks), self.number(length)
        mine = x.narrow(dim, min(self.rank * size, length), number)
        if number == size:
            return mine
        return torch.nn.functional.pad(mine, (0, 0) * (x.ndim - 1 - dim) + (0, size - number), value=fill)

    def gather(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Return the whole sequence of the ranks' tokens `x`; the ranks' gradients of it are summed."""
        return x if self.ranks == 1 else gather(x, self.dim, length, self.group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of the sum of the ranks' `x`, whole sequences."""
        return x if self.ranks == 1 else scatter_sum(x, self.dim, self.group)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' `x`, such as losses of own tokens; without a gradient."""
        return x if self.ranks == 1 else all_reduce(x, self.group)
