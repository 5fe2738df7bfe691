"""A job as its author writes it: TOML and command line to a checked `JobConfig`. Imports no torch.

    job = load_job(["configs/gla_debug.toml", "--training.steps", "50"])

What a job becomes on torchtitan's side is `training.job`; whether it can run here is `training.checks`.
"""

from training.config.errors import ConfigError
from training.config.load import load_job
from training.config.schema import JobConfig
from training.config.validate import check_values, schedule_steps

__all__ = ["ConfigError", "JobConfig", "check_values", "load_job", "schedule_steps"]
