"""Megatron-FSDP: the options, by NeMo Automodel's names; how they reach the package is in `parallel.megatron_fsdp`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from titanplans.parallel.strategies.options import Options


@dataclass(frozen=True, kw_only=True)
class MegatronFSDPConfig(Options):
    """Parameters sharded by the package megatron-fsdp, on NVIDIA GPUs; no tensor parallelism beside it."""

    title: ClassVar[str] = "megatron_fsdp"

    megatron_fsdp_unit_modules: tuple[str, ...] | None = None
    """Classes of modules that are gathered at once: "Class", or "module.Class"; unset: that of the decoder's blocks."""

    zero_dp_strategy: Literal[0, 1, 2, 3] = 3
    """What is sharded: nothing (0), optimizer states (1), gradients too (2), parameters too (3)."""

    init_fsdp_with_meta_device: bool = False
    """The model is on meta; each module's reset_parameters gives it its first values, unit by unit."""

    grad_reduce_in_fp32: bool = False
    """Accumulate and reduce gradients in float32; otherwise in the parameters' dtype."""

    preserve_fp32_weights: bool = True
    """Keep the optimizer's copy of the weights in float32; otherwise it steps the weights that compute."""

    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward goes on; the package always does under strategies 2 and 3."""

    overlap_param_gather: bool = True
    """Gather parameters ahead of their use; the package always does under strategy 3."""

    check_for_nan_in_grad: bool = False
    """Refused where it is true: the package dropped it in 0.5; report_nan_in_param_grad is what is left."""

    report_nan_in_param_grad: bool = False
    """Raise an error that names the parameter whose gradient is NaN; slow."""

    average_in_collective: bool = False
    """Let the collective average gradients, instead of scaling them before; not with calculate_per_token_loss."""

    disable_bucketing: bool = False
    """Refused where it is true: by itself the package has no bucket size that this could take away."""

    calculate_per_token_loss: bool = True
    """Sum gradients over ranks: right for a loss divided by the tokens of the whole batch, which all loops here
    have. False: average them, for a loss that is each rank's own mean."""

    keep_fp8_transpose_cache: bool = False
    """Keep transposed float8 weights (Transformer Engine)."""

    nccl_ub: bool = False
    """Communicate from buffers registered with NCCL (the allocator of apex or megatron-core; fsdp_double_buffer)."""

    fsdp_double_buffer: bool = False
    """Two lasting buffers for gathered units, in turn; units must be of one size."""

    activation_checkpointing: bool = False
    """Refused where it is true: the package has none, and recomputing around its hooks has not been shown to be right."""

    def check(self) -> None:
        if self.megatron_fsdp_unit_modules == ():
            raise self.refuse(
                "megatron_fsdp_unit_modules", "names no class: leave it out for the decoder's blocks"
            )
        if self.zero_dp_strategy == 0 and self.init_fsdp_with_meta_device:
            raise self.refuse(
                "init_fsdp_with_meta_device",
                "not with zero_dp_strategy = 0, which shards nothing: set one of them otherwise",
            )
        for name, always in (("overlap_grad_reduce", (2, 3)), ("overlap_param_gather", (3,))):
            if not getattr(self, name) and self.zero_dp_strategy in always:
                raise self.refuse(
                    name,
                    f"megatron-fsdp overlaps all the same under zero_dp_strategy = {self.zero_dp_strategy}: "
                    "leave it out, or take a lower strategy",
                )
        if self.average_in_collective and self.calculate_per_token_loss:
            raise self.refuse(
                "average_in_collective",
                "calculate_per_token_loss sums gradients: set one of the two to false",
            )
        if self.disable_bucketing:
            raise self.refuse(
                "disable_bucketing",
                "it changes nothing in megatron-fsdp, which sizes its buckets by units: leave it out",
            )
        if self.nccl_ub and not self.fsdp_double_buffer:
            raise self.refuse("nccl_ub", "brings double buffers with it: set fsdp_double_buffer to true too")
        if self.activation_checkpointing:
            raise self.refuse(
                "activation_checkpointing", "megatron-fsdp has none: set it to false, or take FSDP2Config"
            )
