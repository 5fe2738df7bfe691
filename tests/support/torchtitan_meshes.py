"""torchtitan's `ParallelDims` on a CPU. By default `ParallelDims` makes CUDA meshes, even on a machine without a GPU."""

from torchtitan.distributed import ParallelDims
from torchtitan.distributed import parallel_dims as module


def parallel_dims(*degrees: int, backend: str = "partial_dtensor") -> ParallelDims:
    """Return `ParallelDims(dp_replicate, dp_shard, cp, tp, pp, ep, world_size)` over CPUs."""
    module.device_type = "cpu"
    return ParallelDims(*degrees, backend)
