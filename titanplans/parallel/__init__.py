"""Parallelise a model: tensor parallelism, activation checkpointing, compile, data parallelism.

    from titanplans.parallel import parallelize                                # in torchtitan's trainer
    from titanplans.parallel import FSDP2Config, ParallelManager
    from titanplans.parallel import process_group  # in your own training loop

torchtitan is not imported: this package only uses the attributes of its ParallelDims and config sections.
"""

from titanplans.adapters.add import Adapters, add_adapters, freeze
from titanplans.config import (
    ActivationCheckpoint,
    Compile,
    DDPConfig,
    Float8,
    FSDP2Config,
    LoRA,
    MegatronFSDPConfig,
    Strategy,
    read_strategy,
    write_strategy,
)
from titanplans.errors import ParallelError
from titanplans.loss import FusedLoss, count_tokens, cross_entropy
from titanplans.parallel.fsdp.conditions import shard_model
from titanplans.parallel.fsdp.gradient_sync import unsharded
from titanplans.parallel.manager import ParallelManager
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.parallel.mesh.process_group import Process, process_group
from titanplans.parallel.optimizers.build import build_optimizers, group_parameters
from titanplans.parallel.optimizers.muon import Muon
from titanplans.parallel.parallelize import parallelize
from titanplans.plan.degrees import Degrees
from titanplans.precision.float8.conversion import Conversion, convert_to_float8
from titanplans.split.gradients import align_gradients, clip_gradients, skip_nonfinite, total_norm

__all__ = [
    "ActivationCheckpoint",
    "Adapters",
    "Compile",
    "Conversion",
    "DDPConfig",
    "Degrees",
    "FSDP2Config",
    "Float8",
    "FusedLoss",
    "LoRA",
    "MegatronFSDPConfig",
    "Mesh",
    "Muon",
    "ParallelError",
    "ParallelManager",
    "Process",
    "Strategy",
    "add_adapters",
    "align_gradients",
    "build_optimizers",
    "clip_gradients",
    "convert_to_float8",
    "count_tokens",
    "cross_entropy",
    "freeze",
    "group_parameters",
    "parallelize",
    "process_group",
    "read_strategy",
    "shard_model",
    "skip_nonfinite",
    "total_norm",
    "unsharded",
    "write_strategy",
]
