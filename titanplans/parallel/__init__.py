"""HOW a model is parallelised: tensor parallelism, activation checkpointing, compile, data parallelism.

    from titanplans.parallel import parallelize                                # in torchtitan's trainer
    from titanplans.parallel import FSDP2Config, ParallelManager, process_group      # in a loop of your own

Imports no trainer: torchtitan's objects are read by their attributes.
"""

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
from titanplans.parallel.adapters import Adapters, add_adapters, freeze
from titanplans.parallel.degrees import Degrees
from titanplans.parallel.float8 import Conversion, convert_to_float8
from titanplans.parallel.fsdp.conditions import shard_model
from titanplans.parallel.fsdp.gradient_sync import unsharded
from titanplans.parallel.manager import ParallelManager
from titanplans.parallel.mesh import Mesh
from titanplans.parallel.muon import Muon
from titanplans.parallel.optimizers import build_optimizers, group_parameters
from titanplans.parallel.parallelize import parallelize
from titanplans.parallel.process_group import Process, process_group
from titanplans.tensor_parallel.gradients import align_gradients, clip_gradients, skip_nonfinite, total_norm
from titanplans.tensor_parallel.loss import FusedLoss, count_tokens, cross_entropy

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
