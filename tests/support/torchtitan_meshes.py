"""torchtitan's `ParallelDims` on a CPU. By default they make CUDA meshes, also on a machine without an accelerator."""

from torchtitan.distributed import ParallelDims
from torchtitan.distributed import parallel_dims as module


def parallel_dims(*degrees: int, backend: str = "partial_dtensor") -> ParallelDims:
    """Return `ParallelDims(dp_replicate, dp_shard, cp, tp, pp, ep, world_size)` over CPUs."""
    module.device_type = "cpu"
    return ParallelDims(*degrees, backend)
