"""The cut that splits nothing: for a model with expert parallelism, and neither tensor nor context parallelism."""

from torch.distributed.device_mesh import DeviceMesh

from titanplans.plan.layout import StreamLayout
from titanplans.plan.resolve import Entry
from titanplans.split.local_code import HeadRanks
from titanplans.split.meshes import CutMeshes
from titanplans.split.stream import Border


class Untouched:
    """Leaves modules and parameters as they are. `alone`: a mesh of this rank, which alone works on its batch."""

    distributes, sums = False, True

    def __init__(self, alone: DeviceMesh):
        self.mesh = alone
        self.border = Border(CutMeshes(None, None, alone, alone), StreamLayout(sharded=False))
        self.ranks = HeadRanks(0, 1, (alone.get_group().group_name, 1), self.border, (0,))

    def lay_out(self, entry: Entry) -> None:
        """Leave the parameters of `entry` plain."""

    def install(self, entry: Entry, border: Border) -> None:
        """Put no hooks on its module."""
