"""The paths that a job writes to, locked, and tried before a rank starts: the same folders are made, and removed.

The libraries make their folders when they come to them, some at the first checkpoint, and each fails in its own way.
"""

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
from titanplans.training.checkpoint.folder import own_folder
from titanplans.training.job.resolve import trace_buf_size
from titanplans.training.trainer.jsonl import FILE_NAME, read_metrics
from titanplans.training.trainer.parallelism_report import FILE


def outputs(job: JobConfig) -> Iterator[tuple[str, Path, bool]]:
    """Yield the paths that `job` writes to: the key that gives it, the path, below dump_folder, and whether it is a file."""
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
    for key in (key for key, wanted in folders.items() if wanted):
        yield key, dump / attrgetter(key)(job), False
    if folders["checkpoint.folder"]:
        yield "checkpoint.folder", dump / job.checkpoint.folder / LOCK, True


def check_outputs(job: JobConfig) -> None:
    """Refuse a path that this job can't write to. Leaves nothing behind.

    Raises:
        ConfigError: the first one, with its key and the system's reason.
    """
    for key, path, is_file in outputs(job):
        try:
            why = _obstacle(path, is_file)
        except OSError as error:
            why = f"{path} can't be made ({error.strerror})"
        if why is not None:
            raise ConfigError(f"{key} = {show(attrgetter(key)(job))}: {why}; name another path")
    if job.metrics.enable_jsonl:
        for pattern in (FILE_NAME, f"rank_*/{FILE_NAME}"):
            for rows in sorted(Path(job.job.dump_folder).glob(pattern)):
                read_metrics(rows)


def _obstacle(path: Path, is_file: bool) -> str | None:
    """Return why the file, or a file in the folder, can't be written; None if it can."""
    if is_file and path.exists():
        if not path.is_file():
            return f"{path} is not a regular file"
        return None if os.access(path, os.W_OK) else f"{path} may not be written"
    inside = Path(os.path.abspath(path if is_file else path / "file"))
    there = next(folder for folder in inside.parents if os.path.lexists(folder))
    if not there.is_dir():
        return f"{there} is a file, or a link that leads nowhere, and not a directory"
    # A folder of its own: ranks of torchrun ask at the same time.
    with tempfile.TemporaryDirectory(prefix=".titanplans-", dir=there) as probe:
        file = Path(probe) / inside.relative_to(there)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return None


@contextlib.contextmanager
def locked(job: JobConfig) -> Iterator[None]:
    """Make and lock the folders that `job` writes to: dump_folder, and that of its checkpoints if it saves any.

    Raises:
        ConfigError: another process holds one; which, on which machine, and since when.
    """
    held = [("job.dump_folder", job.job.dump_folder, Path(job.job.dump_folder))]
    if job.checkpoint.enable and not job.checkpoint.load_only:
        held.append(("checkpoint.folder", job.checkpoint.folder, own_folder(job)))
    with contextlib.ExitStack() as stack:
        for key, value, folder in held:
            stack.enter_context(locked_folder(folder, f"{key} = {show(value)}"))
        yield
