"""HOW a model is parallelised: tensor parallelism, activation checkpointing, compile, data parallelism.

    from parallel import parallelize                                # in torchtitan's trainer
    from parallel import FSDP2Config, ParallelManager, process_group      # in a loop of one's own

Imports no trainer: the objects it is given are read by their attributes, which are torchtitan's.
"""

from parallel.activation_checkpoint import EveryNthLayer, Full, MemoryBudget, MLPOnly
from parallel.conditions import shard_model
from parallel.degrees import Degrees
from parallel.errors import ParallelError
from parallel.float8 import Conversion, convert_to_float8
from parallel.gradient_sync import unsharded
from parallel.gradients import clip_gradients, skip_nonfinite, total_norm
from parallel.kept import KeepMixer
from parallel.loss import count_tokens, cross_entropy
from parallel.manager import ParallelManager
from parallel.mesh import Mesh
from parallel.order import apply_strategy
from parallel.parallelize import parallelize
from parallel.process_group import Process, process_group
from parallel.selective import Selective
from parallel.strategies import (
    ActivationCheckpointing,
    Compile,
    DDPConfig,
    Float8,
    FSDP2Config,
    MegatronFSDPConfig,
    MixedPrecision,
    Strategy,
    read_strategy,
    write_strategy,
)

__all__ = [
    "ActivationCheckpointing",
    "Compile",
    "Conversion",
    "DDPConfig",
    "Degrees",
    "EveryNthLayer",
    "FSDP2Config",
    "Float8",
    "Full",
    "KeepMixer",
    "MLPOnly",
    "MegatronFSDPConfig",
    "MemoryBudget",
    "Mesh",
    "MixedPrecision",
    "ParallelError",
    "ParallelManager",
    "Process",
    "Selective",
    "Strategy",
    "apply_strategy",
    "clip_gradients",
    "convert_to_float8",
    "count_tokens",
    "cross_entropy",
    "parallelize",
    "process_group",
    "read_strategy",
    "shard_model",
    "skip_nonfinite",
    "total_norm",
    "unsharded",
    "write_strategy",
]
