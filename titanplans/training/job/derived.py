"""`keep_derived_plan`: derive, prove and keep the plan of a job with `model.derive`, before its ranks start."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from titanplans.config import ConfigError, JobConfig
from titanplans.errors import ParallelError
from titanplans.lock import locked_file
from titanplans.modeling.user_model import is_user_model
from titanplans.parallel.record import record_of
from titanplans.plan.kept import facts_of, file_for, kept_plan
from titanplans.plan.registry import model_type_of, registered_plans
from titanplans.plan.structure import digests
from titanplans.split.objects import gather_objects

_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_log = logging.getLogger(__name__)


def keep_derived_plan(job: JobConfig, model: PreTrainedModel) -> None:
    """Make sure that a kept plan exists, if `model.derive` allows it and no plan is registered for the job's model.

    Another process derives and proves the plan, since a proof replaces kernels and runs on the CPU. If several processes of
    one machine call this at the same time, one derives and the others wait.

    Args:
        job: the job.
        model: its model, unsplit, on meta.

    Raises:
        ConfigError: no plan can be derived for this model, or none is proved; the message has the reason.
        PlanError: as `kept_plan`.
    """
    if not job.model.derive or model_type_of(model) in registered_plans():
        return
    if is_user_model(model.config):
        raise _refused(
            "small models of a class of your own can't be made from its config; run titanplans derive my_models:small "
            "--output my_plan.py with a function that returns a small one, and name the class in model.plan"
        )
    if kept_plan(model) is not None:
        return
    name = type(model).__name__
    _log.info(
        f"Plan: none is registered for {name}; one is derived and proved on the CPU, which may take minutes"
    )
    lock = file_for(facts_of(model)).with_suffix(".lock")
    try:
        with locked_file(lock):
            if kept_plan(model) is None:
                _derive(job, model)
    except OSError as error:
        raise _refused(
            f"{error.filename or lock.parent} can't be written ({error.strerror}); set XDG_CACHE_HOME to another folder"
        ) from error


def check_same_plan(model: nn.Module) -> None:
    """Check that all ranks have split `model` by the same plan, compared by its source code. Collective.

    Raises:
        ParallelError: the plans differ, which happens if each machine derives one.
    """
    applied = record_of(model).plan
    plans = gather_objects(None if applied is None else digests([type(applied.plan)]))
    if differing := [rank for rank, plan in enumerate(plans) if plan != plans[0]]:
        raise ParallelError(
            f"model.derive = true: the kept plans of rank {differing[0]} and rank 0 differ; set XDG_CACHE_HOME to a folder "
            "that all machines share"
        )


def _derive(job: JobConfig, model: nn.Module) -> None:
    """Run `titanplans derive --keep` for the job, which writes the kept plan."""
    began = time.monotonic()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith(("TORCHELASTIC_", "TITANPLANS_"))
    }
    environment["CUDA_VISIBLE_DEVICES"] = ""  # the proof runs on the CPU, also on a machine with GPUs
    if not sys.flags.safe_path:
        # As in this process, the user's modules may be in a folder of sys.path or in the working directory.
        environment["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), os.getcwd()])
    with tempfile.TemporaryDirectory(prefix="titanplans-") as folder:
        file = Path(folder) / "job.toml"
        file.write_text(job.to_toml(), encoding="utf-8")
        process = subprocess.run(
            [sys.executable, "-m", "titanplans", "derive", str(file), "--keep"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode != 0:
        raise _refused(
            f"{_reason(process, type(model).__name__)}; write a plan (docs/plans.md) and name it in model.plan"
        )
    kept = kept_plan(model)
    if kept is None:
        raise _refused(
            "the process that derived it built another model than this one, so the plan is not proved for it; run "
            "titanplans derive --output plan.py with this job, verify that plan, and name its class in model.plan"
        )
    _log.info(f"Plan: {kept.origin}; {time.monotonic() - began:.0f} s")


def _reason(process: subprocess.CompletedProcess[str], name: str) -> str:
    """Return why `titanplans derive` has not proved a plan, from the last line that it printed."""
    if process.returncode == 1 and (lines := process.stdout.splitlines()):
        notes = [line.removeprefix("# ") for line in lines if line.startswith("# not proved: ")]
        return f"the derived plan of {name} is {lines[-1]}{''.join(f' ({note})' for note in notes)}"
    *_, last = ["", *process.stderr.strip().splitlines()]
    if process.returncode != 2:  # it was killed, or failed
        last = f"titanplans derive ended with exit status {process.returncode} ({last})"
    return f"no plan of {name} is derived: {last.removeprefix('error: ')}"


def _refused(why: str) -> ConfigError:
    return ConfigError(f"model.derive = true: {why}")
