"""Strategies: what `parallelize` and `ParallelManager` take, made of the same groups of options as a job's sections.

FSDP2Config(mixed_precision_param="bfloat16", compile={"enable": True}).to_toml()
FSDP2Config(activation_checkpointing=True)          # Automodel's name, and its bool
read_strategy('strategy = "ddp"')
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import tomli_w

from titanplans.config.options import Options, parse_toml, without_none
from titanplans.config.sections.model import PlanOption
from titanplans.config.sections.parallelism import (
    DDP,
    FSDP2,
    ActivationCheckpoint,
    Autocast,
    Compile,
    MixedPrecision,
    Offload,
    TensorParallel,
)
from titanplans.config.sections.quantize import Float8
from titanplans.errors import ConfigError, nearest


class Shared(Options):
    """What happens to a model before it is spread over data-parallel ranks."""

    float8: Float8 = Float8()
    """Which Linear modules multiply in float8."""

    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    """What is computed again in the backward."""

    compile: Compile = Compile()
    """What is compiled."""


class FSDP2Config(Shared, FSDP2, Offload, Autocast, MixedPrecision, PlanOption, TensorParallel):
    """Parameters sharded over data-parallel ranks, layers split over tensor-parallel ones; degrees are the mesh's."""

    title: ClassVar[str] = "fsdp2"


class DDPConfig(Shared, Autocast, DDP):
    """A whole model on each rank, each with other data; gradients are summed."""

    title: ClassVar[str] = "ddp"
    section: ClassVar[str] = ""


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


Strategy = FSDP2Config | DDPConfig | MegatronFSDPConfig

_STRATEGIES: dict[str, type[Strategy]] = {
    cls.title: cls for cls in (FSDP2Config, DDPConfig, MegatronFSDPConfig)
}


def read_strategy(source: str | Mapping[str, Any]) -> Strategy:
    """Return the strategy that a TOML text or a dict holds: its options, and `strategy`, which says whose.

    Raises:
        ConfigError: not TOML, or no or an unknown strategy.
        OptionError: no such option, or a value that it can't have.
    """
    if not isinstance(source, str | Mapping):
        raise ConfigError(f"a strategy of type {type(source).__name__}: give TOML as a string, or a dict")
    values = dict(parse_toml(source, "strategy") if isinstance(source, str) else source)
    name = values.pop("strategy", None)
    if name is None:
        raise ConfigError(f"strategy is missing: set it to one of {', '.join(_STRATEGIES)}")
    if not isinstance(name, str) or name not in _STRATEGIES:
        meant = nearest(str(name), list(_STRATEGIES))
        instead = f"did you mean {meant}?" if meant else f"there are {', '.join(_STRATEGIES)}"
        raise ConfigError(f"strategy = {name!r}: no such strategy; {instead}")
    return _STRATEGIES[name].from_dict(values)


def write_strategy(strategy: Strategy) -> str:
    """Return the strategy as TOML that `read_strategy` reads back as an equal one.

    Raises:
        OptionError: a value has no form in TOML, such as a class.
    """
    return tomli_w.dumps({"strategy": strategy.title, **without_none(strategy.to_dict())})
