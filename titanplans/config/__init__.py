"""A job as its author writes it: TOML and command line to a checked `JobConfig`. Imports no torch.

    job = load_job(["configs/gla_debug.toml", "--training.steps", "50"])

What a job becomes on torchtitan's side is `titanplans.training.job`; whether it can run here `training.checks`.
"""

from titanplans.config.load import load_job
from titanplans.config.schema import JobConfig
from titanplans.config.validate import check_values, schedule_steps
from titanplans.errors import ConfigError

__all__ = ["ConfigError", "JobConfig", "check_values", "load_job", "schedule_steps"]
