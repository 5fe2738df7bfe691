"""All options, each declared once for jobs, strategies, the command line and the documentation. Imports no torch.

    job = load_job(["configs/gla_debug.toml", "--training.steps", "50"])
    FSDP2Config(enable_sequence_parallel=False, compile={"enable": True})

`training.job` checks whether a job can run on this machine.
"""

from titanplans.config.load import load_job
from titanplans.config.schema import JobConfig, rename_option_errors, strategy_of
from titanplans.config.sections.optimization import Optimizer, OptimizerGroup
from titanplans.config.sections.parallelism import ActivationCheckpoint, Compile
from titanplans.config.sections.weights import Float8, LoRA
from titanplans.config.strategies import (
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    Strategy,
    read_strategy,
    write_strategy,
)
from titanplans.errors import ConfigError, OptionError

__all__ = [
    "ActivationCheckpoint",
    "Compile",
    "ConfigError",
    "DDPConfig",
    "FSDP2Config",
    "Float8",
    "JobConfig",
    "LoRA",
    "MegatronFSDPConfig",
    "Optimizer",
    "OptimizerGroup",
    "OptionError",
    "Strategy",
    "load_job",
    "read_strategy",
    "rename_option_errors",
    "strategy_of",
    "write_strategy",
]
