"""The paths that a job writes to: `check_outputs` tests them before a rank starts, and `locked` locks the job's folders."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from titanplans.config import ConfigError, JobConfig
from titanplans.lock import LOCK, locked_folder
from titanplans.parallel.pipeline.picture import FILE as PICTURE
from titanplans.parallel.pipeline.picture import MEASURED_FILE as MEASURED_PICTURE
from titanplans.text import show
from titanplans.training.checkpoint.folder import checkpoint_folder
from titanplans.training.job.resolve import trace_buf_size
from titanplans.training.trainer.jsonl import FILE_NAME, read_metrics
from titanplans.training.trainer.parallelism_report import FILE


def outputs(job: JobConfig) -> Iterator[tuple[str, Path, bool]]:
    """Yield each path that `job` writes to, as (option that names it, path, whether it is a file)."""
    dump = Path(job.job.dump_folder)
    yield "job.dump_folder", dump, False
    names = [FILE, LOCK, *([FILE_NAME] if job.metrics.enable_jsonl else [])]
    names += [PICTURE, MEASURED_PICTURE] if job.parallelism.pipeline_parallel_degree > 1 else []
    for name in names:
        yield "job.dump_folder", dump / name, True
    if job.job.save_config_file is not None:
        yield "job.save_config_file", dump / job.job.save_config_file, True
    folders = {
        "metrics.save_tb_folder": job.metrics.enable_tensorboard or job.metrics.enable_wandb,
        "checkpoint.folder": job.checkpoint.enable and not job.checkpoint.load_only,
        "profiling.save_traces_folder": job.profiling.enable_profiling,
        "profiling.save_memory_snapshot_folder": job.profiling.enable_memory_snapshot,
        "comm.save_traces_folder": trace_buf_size(job) > 0,
    }
    for key in (key for key, is_used in folders.items() if is_used):
        yield key, dump / attrgetter(key)(job), False
    if folders["checkpoint.folder"]:
        yield "checkpoint.folder", dump / job.checkpoint.folder / LOCK, True


def check_outputs(job: JobConfig) -> None:
    """Refuse a path that the job can't write to, and files of metrics that it can't continue; change nothing.

    Raises:
        ConfigError: names the first option at fault, and the system's reason.
    """
    # The paths are tested now, since the libraries create their folders late, some only at the first checkpoint, and
    # report errors in different ways.
    for key, path, is_file in outputs(job):
        try:
            reason = _obstacle(path, is_file)
        except OSError as error:
            reason = f"{path} can't be created ({error.strerror})"
        if reason is not None:
            raise ConfigError(f"{key} = {show(attrgetter(key)(job))}: {reason}; name another path")
    if job.metrics.enable_jsonl:
        for pattern in (FILE_NAME, f"rank_*/{FILE_NAME}"):
            for metrics_file in sorted(Path(job.job.dump_folder).glob(pattern)):
                read_metrics(metrics_file)  # raises for a file that it can't read


def _obstacle(path: Path, is_file: bool) -> str | None:
    """Return why the file `path`, or a file in the folder `path`, can't be written; None if nothing prevents it."""
    if is_file and path.exists():
        if not path.is_file():
            return f"{path} is not a regular file"
        return None if os.access(path, os.W_OK) else f"{path} is not writable"
    inside = Path(os.path.abspath(path if is_file else path / "file"))
    existing = next(folder for folder in inside.parents if os.path.lexists(folder))
    if not existing.is_dir():
        return f"{existing} is a file or a broken link, not a folder"
    # Create the missing folders inside a temporary folder, so that nothing is left, and so that ranks of torchrun, which
    # do this at the same time, do not disturb each other.
    with tempfile.TemporaryDirectory(prefix=".titanplans-", dir=existing) as probe:
        file = Path(probe) / inside.relative_to(existing)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return None


@contextlib.contextmanager
def locked(job: JobConfig) -> Iterator[None]:
    """Create and lock the folders that `job` writes to: dump_folder, and the folder of checkpoints if it saves any.

    Raises:
        ConfigError: another process has locked one of them; names the process, its machine and the time.
    """
    folders = [("job.dump_folder", job.job.dump_folder, Path(job.job.dump_folder))]
    if job.checkpoint.enable and not job.checkpoint.load_only:
        folders.append(("checkpoint.folder", job.checkpoint.folder, checkpoint_folder(job)))
    with contextlib.ExitStack() as stack:
        for key, value, folder in folders:
            stack.enter_context(locked_folder(folder, f"{key} = {show(value)}"))
        yield
