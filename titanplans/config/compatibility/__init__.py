"""What contradicts what: every refusal that follows from options alone, by what it concerns.

One function a group of options, which yields each option that is refused, and the reason with the remedy. It is called where
the group is made (`REFUSALS`, by the name of the class), so a job, a strategy in Python and the command line refuse alike.
What depends on the mesh, the device or the model is in `placement`, whose facts `parallelize` knows.
"""

from collections.abc import Callable
from typing import Any

from titanplans.config.compatibility import groups, job, strategy
from titanplans.config.compatibility.words import Refusals

REFUSALS: dict[str, Callable[[Any], Refusals]] = {
    "ActivationCheckpoint": groups.activation_checkpoint,
    "Compile": groups.compiled,
    "Loss": groups.loss,
    "Optimizer": groups.optimizer,
    "OptimizerGroup": groups.optimizer_group,
    "Float8": groups.float8,
    "LoRA": groups.lora,
    "FSDP2Config": strategy.fsdp2,
    "DDPConfig": strategy.ddp,
    "JobConfig": job.refusals,
}
"""By the class whose options are read."""
