"""DDP: the options; what they do to a model is in `titanplans.parallel.ddp`."""

from dataclasses import dataclass, field
from typing import ClassVar

from titanplans.parallel.strategies.float8 import Float8
from titanplans.parallel.strategies.options import Options
from titanplans.parallel.strategies.sections import (
    ActivationCheckpointing,
    Compile,
    Dtype,
    check_recomputation,
)


@dataclass(frozen=True, kw_only=True)
class DDPConfig(Options):
    """A whole model on each rank, each with other data; gradients are summed."""

    title: ClassVar[str] = "ddp"

    bucket_cap_mb: float | None = None
    """MiB of gradients that one all-reduce sums; unset: torch's 25, and 1 for the first."""

    find_unused_parameters: bool = False
    """Look in each forward for parameters that the outputs don't depend on, which would be waited for."""

    static_graph: bool = False
    """The same parameters are used in every step, and as often: learnt in the first. Not with defer_grad_sync, of
    which torch then loses count (pytorch #143580)."""

    gradient_as_bucket_view: bool = False
    """Gradients are views of the buckets, which saves a copy of them."""

    broadcast_buffers: bool = False
    """Give buffers rank 0's values before each forward in training, not only when the model is parallelised."""

    autocast_dtype: Dtype | None = None
    """Run the forward under torch.autocast with this dtype; parameters and gradients stay as they are."""

    defer_grad_sync: bool = True
    """Over accumulated micro batches, sum gradients once, in the last one's backward."""

    split_compiled_blocks: bool = False
    """Cut a compiled block's graph where buckets end, so that a bucket is summed while the rest of its block runs
    backward; for blocks larger than a bucket. Otherwise a block stays one graph."""

    float8: Float8 = field(default_factory=Float8)
    """Which Linear modules multiply in float8."""

    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    """What is computed again in the backward."""

    compile: Compile = field(default_factory=Compile)
    """What is compiled."""

    def check(self) -> None:
        if self.bucket_cap_mb is not None and self.bucket_cap_mb * 2**20 < 1:
            raise self.refuse(
                "bucket_cap_mb", "MiB of gradients in one all-reduce, above 0; torch's default is 25"
            )
        if self.static_graph and self.find_unused_parameters:
            raise self.refuse(
                "static_graph",
                "the first step tells which parameters are unused: set find_unused_parameters to false",
            )
        if self.static_graph and self.defer_grad_sync:
            raise self.refuse(
                "static_graph", "torch then can't defer sums of gradients: set defer_grad_sync to false"
            )
        if self.split_compiled_blocks and not self.compile.blocks:
            raise self.refuse(
                "split_compiled_blocks",
                'no block is compiled: set compile.enable to true with "model" in components',
            )
        if self.split_compiled_blocks and self.bucket_cap_mb is not None and self.bucket_cap_mb < 1:
            raise self.refuse(
                "bucket_cap_mb", "split_compiled_blocks needs at least 1, which is torch's first bucket"
            )
        if self.compile.enable_async_tensor_parallel:
            raise self.compile.refuse(
                "enable_async_tensor_parallel", "DDP has no tensor parallelism: take FSDP2Config, or drop it"
            )
        if self.float8.fsdp_all_gather:
            raise self.float8.refuse("fsdp_all_gather", "DDP gathers no weights: take fsdp2, or leave it out")
        check_recomputation(self.activation_checkpointing, self.compile)
