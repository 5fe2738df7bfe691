"""The two borders of a tensor-parallel region, on plain local tensors.

Outside a region lies the residual stream: each rank holds its shard of the sequence (sequence
parallelism) or a replica. Inside, every rank holds the whole sequence and its share of the heads
or of the MLP width, and computes a partial sum of the region's output. `enter` and `leave` cross
the border; their backwards are each other's mirror image (Megatron-LM's f, g and their
sequence-parallel forms, Korthikanti et al. 2022, "Reducing Activation Recomputation", figure 5):

    border   sequence parallel   forward          backward
    enter    yes                 all-gather       reduce-scatter
    enter    no                  identity         all-reduce
    leave    yes                 reduce-scatter   all-gather
    leave    no                  all-reduce       identity

Tensors are local on both sides, so a Triton kernel may stand anywhere; DTensor does the
collectives, and with them the autograd.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


def stream_placement(sequence_parallel: bool, sequence_dim: int) -> Placement:
    """Return how the residual stream lies on the TP mesh: its sequence sharded, or replicated."""
    return Shard(sequence_dim) if sequence_parallel else Replicate()


def enter(x: torch.Tensor, mesh: DeviceMesh, stream: Placement) -> torch.Tensor:
    """Bring the stream's local tensor `x` into a region: the whole sequence on every rank.

    Each rank's gradient of the result is partial (it has seen its own shard of the heads only);
    the backward sums them and lays the sum out as the stream.
    """
    outside = DTensor.from_local(x, mesh, (stream,), run_check=False)
    return outside.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial(),))


def leave(x: torch.Tensor, mesh: DeviceMesh, stream: Placement) -> torch.Tensor:
    """Sum the partial results `x` of a region over the ranks and lay the sum out as the stream."""
    inside = DTensor.from_local(x, mesh, (Partial(),), run_check=False)
    return inside.redistribute(placements=(stream,)).to_local(grad_placements=(stream,))
