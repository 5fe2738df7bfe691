"""Which degrees can't be honoured."""

from typing import Any

from titanplans.errors import ParallelError

NOT_FOR_DDP = (
    "DDP can't copy split layers; take FSDP2Config with dp_replicate at the number of copies and dp_shard at 1, which sums "
    "gradients over the copies as DDP does"
)


def refuse_degrees(degrees: Any, *, ddp: bool = False) -> None:
    """Refuse the degrees that can't be honoured: yet, or by DDP, which copies whole models.

    Args:
        degrees: `Degrees`, resolved, a `Mesh` or torchtitan's ParallelDims.
        ddp: whether the strategy is DDP.

    Raises:
        ParallelError: a pipeline degree above 1; under DDP also a tensor, shard or expert degree.
    """
    if degrees.pp > 1:
        raise ParallelError(
            f"pipeline_parallel_degree = {degrees.pp}: this entry parallelises by tensor, tokens, experts and data; set it "
            "to 1"
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
