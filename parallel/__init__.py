"""HOW a model is parallelised: tensor parallelism, activation checkpointing, compile, data parallelism.

    from parallel import parallelize

Imports no trainer: the objects it is given are read by their attributes, which are torchtitan's.
"""

from parallel.activation_checkpoint import EveryNthLayer
from parallel.errors import ParallelError
from parallel.parallelize import parallelize

__all__ = ["EveryNthLayer", "ParallelError", "parallelize"]
