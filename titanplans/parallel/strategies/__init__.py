"""Strategies: typed options for how a model is spread over ranks; checked when made, written and read as TOML.

    FSDP2Config(mixed_precision={"param_dtype": "bfloat16"}).to_toml()
    read_strategy('strategy = "ddp"')

Which options of two strategies exclude each other, and the model, is not known here.
"""

from collections.abc import Mapping
from typing import Any

from titanplans.errors import ParallelError
from titanplans.parallel.strategies.ddp import DDPConfig
from titanplans.parallel.strategies.float8 import Float8
from titanplans.parallel.strategies.fsdp2 import FSDP2Config
from titanplans.parallel.strategies.megatron_fsdp import MegatronFSDPConfig
from titanplans.parallel.strategies.options import instead, read_toml
from titanplans.parallel.strategies.sections import ActivationCheckpointing, Compile, MixedPrecision

Strategy = FSDP2Config | DDPConfig | MegatronFSDPConfig

__all__ = [
    "ActivationCheckpointing",
    "Compile",
    "DDPConfig",
    "FSDP2Config",
    "Float8",
    "MegatronFSDPConfig",
    "MixedPrecision",
    "Strategy",
    "read_strategy",
    "write_strategy",
]

_STRATEGIES: dict[str, type[Strategy]] = {
    cls.title: cls for cls in (FSDP2Config, DDPConfig, MegatronFSDPConfig)
}


def read_strategy(source: str | Mapping[str, Any]) -> Strategy:
    """Return the strategy that a TOML text or a dict holds: its options, and `strategy`, which says whose.

    Raises:
        ParallelError: not TOML, no or an unknown strategy, no such option, or a value that it can't have.
    """
    if not isinstance(source, str | Mapping):
        raise ParallelError(f"a strategy of type {type(source).__name__}: give TOML as a string, or a dict")
    values = dict(read_toml(source, "strategy") if isinstance(source, str) else source)
    name = values.pop("strategy", None)
    if name is None:
        raise ParallelError(f"strategy is missing: set it to one of {', '.join(_STRATEGIES)}")
    if not isinstance(name, str) or name not in _STRATEGIES:
        raise ParallelError(f"strategy = {name!r}: no such strategy; {instead(str(name), list(_STRATEGIES))}")
    return _STRATEGIES[name].from_dict(values)


def write_strategy(strategy: Strategy) -> str:
    """Return the strategy as TOML that `read_strategy` reads back as an equal one.

    Raises:
        ParallelError: a value has no form in TOML, such as a class.
    """
    return f'strategy = "{strategy.title}"\n{strategy.to_toml()}'
