"""Strategies: the configs that `parallelize` and `ParallelManager` take. They have the options of a job's sections.

FSDP2Config(mixed_precision_param="bfloat16", compile={"enable": True}).to_toml()
FSDP2Config(activation_checkpointing=True)          # NeMo Automodel's name
read_strategy('strategy = "ddp"')
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import tomli_w
from annotated_types import Ge, Le
from pydantic import Field

from titanplans.config.compatibility import strategy
from titanplans.config.options import Options, parse_toml
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
from titanplans.config.sections.weights import Float8, Freezing, LoRA
from titanplans.config.values import Constraint
from titanplans.errors import ConfigError, did_you_mean


class StrategyOptions(Freezing):
    """Options of both FSDP2 and DDP, which are applied before data parallelism."""

    lora: LoRA = LoRA()
    """Low-rank adapters; all other parameters are frozen. Off by default."""

    float8: Float8 = Float8()
    """Conversion of Linear modules to float8. Off by default."""

    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    """What is recomputed in the backward. Nothing by default."""

    compile: Compile = Compile()
    """What torch.compile compiles. Nothing by default."""


class FSDP2Config(
    StrategyOptions,
    FSDP2,
    Offload,
    Autocast,
    MixedPrecision,
    PlanOption,
    TensorParallel,
    refuses=strategy.fsdp2,
):
    """FSDP2 over the data-parallel ranks, with tensor, context and expert parallelism. The mesh sets the degrees."""

    title: ClassVar[str] = "fsdp2"


class DDPConfig(StrategyOptions, Autocast, PlanOption, DDP, section="", refuses=strategy.ddp):
    """DDP: the model is replicated on each data-parallel rank, and gradients are summed."""

    title: ClassVar[str] = "ddp"


class MegatronFSDPConfig(Options):
    """FSDP of the package megatron-fsdp, on NVIDIA GPUs, without tensor parallelism."""

    title: ClassVar[str] = "megatron_fsdp"

    fsdp_unit_modules: Annotated[tuple[str, ...], Constraint("at least one", bool)] | None = None
    """Names of the classes whose modules become FSDP modules; unset: the class of the decoder's blocks."""

    zero_dp_strategy: Annotated[int, Ge(0), Le(3)] = 3
    """What is sharded: nothing (0), optimizer states (1), gradients too (2), parameters too (3)."""

    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Switches of megatron_fsdp.fully_shard_model and dtypes of its MixedPrecisionPolicy, with megatron-fsdp's names."""


Strategy = FSDP2Config | DDPConfig | MegatronFSDPConfig

_STRATEGIES: dict[str, type[Strategy]] = {
    cls.title: cls for cls in (FSDP2Config, DDPConfig, MegatronFSDPConfig)
}


def read_strategy(source: str | Mapping[str, Any]) -> Strategy:
    """Return the strategy that a TOML text or a dict describes: the key `strategy` names it, all other keys are options.

    Raises:
        ConfigError: the text is not TOML, or `strategy` is missing or unknown.
        OptionError: an option is unknown or has a wrong value.
    """
    if not isinstance(source, str | Mapping):
        raise ConfigError(
            f"a strategy of type {type(source).__name__} can't be read; give TOML as a string, or a dict"
        )
    values = dict(parse_toml(source, "strategy") if isinstance(source, str) else source)
    name = values.pop("strategy", None)
    if name is None:
        raise ConfigError(f"strategy is missing: set it to one of {', '.join(_STRATEGIES)}")
    if not isinstance(name, str) or name not in _STRATEGIES:
        raise ConfigError(f"strategy = {name!r}: no such strategy; {did_you_mean(str(name), _STRATEGIES)}")
    return _STRATEGIES[name](**values)


def write_strategy(strategy: Strategy) -> str:
    """Return the strategy as TOML, from which `read_strategy` returns an equal one.

    Raises:
        OptionError: a value can't be written in TOML, such as a class.
    """
    return tomli_w.dumps({"strategy": strategy.title, **strategy.to_dict(exclude_none=True)})
