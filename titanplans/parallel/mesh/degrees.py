"""Refuse degrees that a strategy or entry point can't honour."""

from typing import Any

from titanplans.errors import ParallelError

NOT_FOR_DDP = (
    "DDP can't replicate split layers; use FSDP2Config with dp_shard = 1 and dp_replicate set to the number of replicas, "
    "which sums gradients over the replicas as DDP does"
)


def refuse_degrees(degrees: Any, *, ddp: bool = False, stage: bool = False) -> None:
    """Refuse a pipeline degree above 1 unless `stage` is set, and under DDP also the degrees tp, ep and dp_shard above 1.

    Args:
        degrees: resolved `Degrees`, a `Mesh` or torchtitan's ParallelDims.
        ddp: whether the strategy is DDP.
        stage: the model is a stage of a pipeline.

    Raises:
        ParallelError: one of these degrees is above 1.
    """
    if degrees.pp > 1 and not stage:
        raise ParallelError(
            f"pp = {degrees.pp}: only jobs build pipeline stages, and this function takes a complete model: set pp to 1, or "
            f"start a job with parallelism.pipeline_parallel_degree = {degrees.pp}"
        )
    if ddp and degrees.ep > 1:
        raise ParallelError(f"ddp with ep = {degrees.ep}: DDP replicates the full model; use FSDP2Config")
    if ddp and degrees.tp > 1:
        raise ParallelError(f"ddp with tp = {degrees.tp}: {NOT_FOR_DDP}")
    if ddp and degrees.dp_shard > 1:
        raise ParallelError(
            f"ddp with dp_shard = {degrees.dp_shard}: DDP shards nothing; set dp_shard to 1 and dp_replicate to "
            f"{degrees.dp_shard * degrees.dp_replicate}, or use FSDP2Config"
        )
