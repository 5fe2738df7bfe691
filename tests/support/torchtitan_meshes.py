"""torchtitan's `ParallelDims` on a CPU: on a machine without an accelerator it makes meshes of CUDA's."""

from torchtitan.distributed import ParallelDims
from torchtitan.distributed import parallel_dims as module


def parallel_dims(*degrees: int, backend: str = "partial_dtensor") -> ParallelDims:
    """Return the dimensions dp_replicate, dp_shard, cp, tp, pp, ep and the number of ranks, over CPUs."""
    module.device_type = "cpu"
    return ParallelDims(*degrees, backend)
