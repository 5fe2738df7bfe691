"""Which degrees can't be honoured."""

from typing import Any

from titanplans.errors import ParallelError

NOT_FOR_DDP = (
    "DDP can't copy split layers; take FSDP2Config with dp_replicate at the number of copies and dp_shard at 1, which sums "
    "gradients over the copies as DDP does"
)


def refuse_degrees(degrees: Any, *, ddp: bool = False, stage: bool = False) -> None:
    """Refuse the degrees that can't be honoured: of a whole model, or by DDP, which copies whole models.

    Args:
        degrees: `Degrees`, resolved, a `Mesh` or torchtitan's ParallelDims.
        ddp: whether the strategy is DDP.
        stage: it is for a stage of a pipeline.

    Raises:
        ParallelError: a pipeline degree above 1 for a whole model; under DDP also a tensor, shard or expert degree.
    """
    if degrees.pp > 1 and not stage:
        raise ParallelError(
            f"pp = {degrees.pp}: this entry parallelises whole models, and stages are made by jobs: set it to 1, or start a "
            f"job with parallelism.pipeline_parallel_degree = {degrees.pp}"
        )
    if ddp and degrees.ep > 1:
        raise ParallelError(f"ddp with ep = {degrees.ep}: DDP copies whole models; take FSDP2Config")
    if ddp and degrees.tp > 1:
        raise ParallelError(f"ddp with tp = {degrees.tp}: {NOT_FOR_DDP}")
    if ddp and degrees.dp_shard > 1:
        raise ParallelError(
            f"ddp with dp_shard = {degrees.dp_shard}: DDP shards nothing; set dp_shard to 1 and dp_replicate to "
            f"{degrees.dp_shard * degrees.dp_replicate}, or take FSDP2Config"
        )
