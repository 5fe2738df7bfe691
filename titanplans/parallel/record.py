"""`ParallelRecord`: what `parallelize` did to a model, stored on the model for reports and checks."""

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
    """The steps of `parallelize` that were applied to a model, and their results."""

    steps: list[str] = field(default_factory=list)
    """Names of the applied steps, in order."""

    roles: Roles | None = None
    """The role of each parameter for an optimizer, found before the model is split."""
    replicas: DeviceMesh | None = None
    """The ranks over which DDP replicates the model."""
    stage: Stage | None = None
    """The pipeline stage that the model is; None: it is the complete model."""
    unsplit_names: Mapping[str, str] = field(default_factory=dict)
    """For parameters that other stages hold too: maps the name in this stage to the name in the unsplit model."""
    plan: AppliedPlan | None = None
    float8: Conversion | None = None
    adapters: Adapters | None = None
    policy: str | None = None
    """A description of the recomputation policy."""
    image_check: RemovableHandle | None = None
    """The hook of `fsdp.images.check_images`, if blocks of a vision or audio tower are FSDP units over several ranks."""


def record_of(model: nn.Module) -> ParallelRecord:
    """Return the record of `model`; if it has none yet, create an empty one."""
    return model.__dict__.setdefault(_NAME, ParallelRecord())
