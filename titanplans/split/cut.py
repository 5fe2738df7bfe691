"""What a way of cutting is: it lays parameters out and installs styles. A plan's styles declare, a cut does."""

from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh

from titanplans.plan.resolve import Entry
from titanplans.split.local_code import HeadRanks
from titanplans.split.stream import Border


class Cut(Protocol):
    """Gives each rank of a mesh its part of the work that a plan's styles declare.

    By weights (`titanplans.split.tensors`) a rank has its heads' weights and all tokens of a region; by tokens it has all
    weights and its tokens, which it exchanges for heads around a mixer's kernel.
    """

    mesh: DeviceMesh
    """1-D, of all ranks that work on the same batch."""
    distributes: bool
    """Parameters become DTensors."""
    sum_over_cp: bool
    """Whoever aligns gradients sums their parts; False: FSDP2 or DDP over a mesh that holds the ranks of "cp" does."""
    ranks: HeadRanks
    """Those that share the heads of a mixer."""
    border: Border
    """Of the residual stream."""

    def lay_out(self, entry: Entry) -> None:
        """Make the parameters of `entry` DTensors on the mesh, which its module reads as local tensors."""
        ...

    def install(self, entry: Entry, border: Border) -> None:
        """Put the hooks of the style of `entry` on its module, at `border`."""
        ...
