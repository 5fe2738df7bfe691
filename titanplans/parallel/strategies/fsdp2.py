"""FSDP2 with tensor parallelism, activation checkpointing and compile: the options, and how `fsdp.shard` names them."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.parallel.compile import async_tp
from titanplans.parallel.fsdp.gradient_sync import Defer
from titanplans.parallel.fsdp.policies import Reshard
from titanplans.parallel.strategies.float8 import Float8
from titanplans.parallel.strategies.options import Options
from titanplans.parallel.strategies.sections import (
    ActivationCheckpointing,
    Compile,
    Dtype,
    MixedPrecision,
    check_recomputation,
    dtype,
)
from titanplans.tensor_parallel import TPPlan


@dataclass(frozen=True, kw_only=True)
class FSDP2Config(Options):
    """Parameters sharded over data-parallel ranks, layers split over tensor-parallel ones; degrees are the mesh's."""

    title: ClassVar[str] = "fsdp2"

    sequence_parallel: bool = True
    """Under tensor parallelism: shard the sequence between the split regions."""

    loss_parallel: bool = True
    """Under tensor parallelism: leave the logits sharded over the vocabulary, for a loss that takes them so."""

    tp_plan: str | dict[str, str | ParallelStyle] | type[TPPlan] | None = None
    """The tensor-parallel plan: a registered name, "module:Class", or a table of module names and styles; unset:
    the model's own. From Python also a TPPlan class, and styles as objects."""

    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    """Dtypes of compute and communication."""

    float8: Float8 = field(default_factory=Float8)
    """Which Linear modules multiply in float8."""

    autocast_dtype: Dtype | None = None
    """Run the forward under torch.autocast with this dtype: operator by operator, beside mixed_precision."""

    cpu_offload: bool = False
    """Keep parameters, gradients and the optimizer's states on the CPU."""

    pin_memory: bool | None = None
    """Under cpu_offload: page-locked memory; unset: if there is an accelerator."""

    reshard_after_forward: Reshard = "default"
    """What is freed between forward and backward: all but what the backward needs first (default), every unit
    (always), none (never), or as default but to shards over that many ranks (a number)."""

    forward_prefetch: int = 0
    """How many units ahead the forward gathers; 0: none."""

    backward_prefetch: int = 0
    """How many units ahead the backward gathers; 0: torch's own rule, which is one."""

    towers: Literal["units", "root"] = "units"
    """Whether each block of a vision tower is a unit, or part of the root: for ranks without images in a step."""

    symmetric_memory: bool = False
    """Communicate through symmetric memory (CUDA, NCCL)."""

    defer_fsdp_grad_sync: Defer = "nothing"
    """Over accumulated micro batches, what waits for the last: nothing; under HSDP the sum over the copies
    (replicas); or every sum (all), for which each rank holds a whole copy of the gradients."""

    keep_gathered: bool = False
    """Keep parameters gathered from one micro batch to the next."""

    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    """What is computed again in the backward."""

    compile: Compile = field(default_factory=Compile)
    """What is compiled."""

    def check(self) -> None:
        if self.pin_memory is not None and not self.cpu_offload:
            raise self.refuse("pin_memory", "nothing is offloaded: set cpu_offload to true, or leave it out")
        if type(self.reshard_after_forward) is int and self.reshard_after_forward < 1:
            raise self.refuse(
                "reshard_after_forward", "a number of ranks is 1 or more; or take default, always or never"
            )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) < 0:
                raise self.refuse(name, "how many units ahead? A whole number from 0 up")
        if self.backward_prefetch and self.reshard_after_forward in ("never", 1):
            raise self.refuse(
                "backward_prefetch",
                f"with reshard_after_forward = {self.reshard_after_forward!r} the backward gathers nothing: set one of them "
                "to its default",
            )
        if self.compile.enable_async_tensor_parallel:
            async_tp.refuse(sequence_parallel=self.sequence_parallel)
        computes = self.mixed_precision.param_dtype
        if self.autocast_dtype is not None and computes not in (None, "float32", self.autocast_dtype):
            raise self.refuse(
                "autocast_dtype",
                f"and mixed_precision.param_dtype = {computes!r} already casts what it computes: leave one out",
            )
        if self.float8.fsdp_all_gather and self.symmetric_memory:
            raise self.refuse(
                "symmetric_memory",
                "has an all-gather of its own, and so has float8.fsdp_all_gather: leave one of them out",
            )
        check_recomputation(self.activation_checkpointing, self.compile)

    def shard_options(self) -> dict[str, Any]:
        """Return the arguments of `fsdp.shard`, but for the model and the mesh."""
        precision = self.mixed_precision
        names = (
            "reshard_after_forward",
            "cpu_offload",
            "pin_memory",
            "forward_prefetch",
            "backward_prefetch",
        )
        return {
            "param_dtype": dtype(precision.param_dtype),
            "reduce_dtype": dtype(precision.reduce_dtype),
            "output_dtype": dtype(precision.output_dtype),
            "cast_forward_inputs": precision.cast_forward_inputs,
            **{name: getattr(self, name) for name in (*names, "towers", "symmetric_memory")},
        }
