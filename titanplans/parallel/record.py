"""What `parallelize` did to a model: one record, kept with the model, that reports and checks read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from titanplans.adapters.add import Adapters
from titanplans.apply.apply import AppliedPlan
from titanplans.parallel.optimizers.roles import Roles
from titanplans.precision.float8.conversion import Conversion
from titanplans.split.stages.stage import Stage

_NAME = "_parallelized"


@dataclass
class ParallelRecord:
    """The steps of `parallelize` that a model has been through, and their results."""

    steps: list[str] = field(default_factory=list)
    """In the order in which they were taken."""

    roles: Roles | None = None
    """The role of each parameter for an optimizer, read before the first step."""
    replicas: DeviceMesh | None = None
    """The ranks over which DDP replicates the model."""
    stage: Stage | None = None
    """The stage of a pipeline that the model is; None: it is the whole."""
    whole_names: Mapping[str, str] = field(default_factory=dict)
    """Of a stage's parameters that other stages hold, too: the name in the whole model, by that in this one."""
    plan: AppliedPlan | None = None
    float8: Conversion | None = None
    adapters: Adapters | None = None
    policy: str | None = None
    """The policy of recomputation, in words."""
    image_check: RemovableHandle | None = None
    """FSDP2's check that each forward has images on all ranks or on none, if it has a tower whose blocks are units."""


def record_of(model: nn.Module) -> ParallelRecord:
    """Return the record of `model`, which is empty before `parallelize`."""
    return model.__dict__.setdefault(_NAME, ParallelRecord())
