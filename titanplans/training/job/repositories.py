"""Models that a job names on the Hugging Face Hub: `with_commits` when the job starts, `download_weights` after its checks.

The rest of the job calls `titanplans.training.job.resolve`, which finds the files in the cache of huggingface_hub.
"""

import functools
import json
import logging
import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from titanplans import hub
from titanplans.config import ConfigError, JobConfig
from titanplans.errors import UserError
from titanplans.text import show
from titanplans.torchrun import Ranks, read_ranks
from titanplans.training.checkpoint import folder as folders
from titanplans.training.checkpoint.manifest import damage, read_manifest
from titanplans.training.job import resolve

_PATIENCE = timedelta(days=1)
"""How long a rank waits for the rank that downloads."""

_log = logging.getLogger(__name__)


def with_commits(job: JobConfig, *, resumes: bool) -> JobConfig:
    """Return the job with the commit of each repository that it names, "owner/name@commit"; download all but the weights.

    A repository without a revision gets the commit that the job's newest checkpoint names for this repository; if it names
    none, the newest commit. Under torchrun rank 0 decides for all ranks, and one rank of each machine downloads. The other
    ranks wait, so every rank has to call this.

    Args:
        job: the job.
        resumes: whether the commit may be taken from a checkpoint.

    Raises:
        ConfigError: a repository can't be downloaded, or lacks a file that the job needs; see `hub.download`.
    """
    paths = {option: resolve.hub_path(job, option) for option in resolve.HUB_OPTIONS}
    named = {option: hub.repository_of(path) for option, path in paths.items() if path is not None}
    repositories = {option: repository for option, repository in named.items() if repository is not None}
    if not repositories:
        return job
    saved = _saved_repositories(job) if resumes else {}
    requested = {
        option: saved[option] if _keeps_commit(repository, saved.get(option)) else repository
        for option, repository in repositories.items()
    }
    commits = json.loads(_on_rank(0, "commits", lambda: _download(job, requested)))
    pinned = {
        option: hub.Repository(repository.name, commits[option])
        for option, repository in repositories.items()
    }
    if first := _first_rank_of_machine():  # rank 0 has the files already
        _on_rank(first, "files", lambda: _download(job, pinned))
    sections: dict[str, dict[str, str]] = {}
    for option, repository in pinned.items():
        section, _, key = option.partition(".")
        sections.setdefault(section, {})[key] = str(repository)
    updated = {section: getattr(job, section).replace(**values) for section, values in sections.items()}
    return job.model_copy(update=updated)


def _download(job: JobConfig, repositories: dict[str, hub.Repository]) -> str:
    """Download all files but the weights of `repositories` (keyed by option); return the commits, keyed by option, as
    JSON."""
    commits = {}
    for option, repository in repositories.items():
        what, required = f"{option} = {show(str(repository))}", resolve.required_files(job, option)
        folder = hub.download(repository, what, required, weights=False)
        _log.info(f"{option}: {repository.name} at commit {folder.name}, in {folder}")
        commits[option] = folder.name
    return json.dumps(commits)


def download_weights(job: JobConfig) -> None:
    """Download the weights that a job begins with, once on each machine, if they come from a repository.

    Under torchrun every rank has to call this: one rank of each machine downloads, and the others wait.

    Raises:
        ConfigError: the weights can't be downloaded; see `hub.download`.
    """
    if (path := resolve.hf_weights_path(job)) is None or hub.repository_of(path) is None:
        return
    option = resolve.hf_weights_option(job)
    what, required = f"{option} = {show(path)}", resolve.required_files(job, option)
    _on_rank(
        _first_rank_of_machine(), "weights", lambda: hub.local_folder(path, what, required, weights=True)
    )


def _saved_repositories(job: JobConfig) -> dict[str, hub.Repository]:
    """Return the repositories in the manifest of the job's newest checkpoint, by option."""
    folder = folders.checkpoint_folder(job)
    if not (steps := folders.steps(folder)):
        return {}
    newest = folders.checkpoint_path(folder, steps[-1])
    if damage(newest, names=()) is not None:  # `decide_resume` refuses it, and names the remedy
        return {}
    values = read_manifest(newest).job
    repositories = {option: hub.repository_of(str(values.get(option))) for option in resolve.HUB_OPTIONS}
    return {option: repository for option, repository in repositories.items() if repository is not None}


def _keeps_commit(repository: hub.Repository, saved: hub.Repository | None) -> bool:
    """Whether the job names no revision of the repository, and the checkpoint names a commit of the same repository."""
    return saved is not None and repository.revision is None and repository.name == saved.name


def _on_rank(rank: int, name: str, action: Callable[[], str]) -> str:
    """Run `action` on one rank of torchrun; return its result on this rank and on all other ranks that call this function.

    Args:
        rank: the rank that runs `action`.
        name: a name for the action, the same on all ranks.
        action: returns a text.

    Raises:
        UserError: `action` raised it.
    """
    if (ranks := _ranks()).world_size == 1:
        return action()
    # No process group exists before a job has been checked. But the store of the ranks exists, or can be started.
    store, key = _store(), f"titanplans/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}/{rank}"
    if ranks.rank == rank:
        try:
            result = action()
        except UserError as error:
            store.set(key, json.dumps({"error": str(error)}))
            raise
        store.set(key, json.dumps({"result": result}))
        return result
    store.wait([key], _PATIENCE)
    answer = json.loads(store.get(key))
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["result"]


@functools.cache
def _store() -> dist.Store:
    """Return the store of torchrun's ranks. Without torchrun's agent, rank 0 serves the store as long as its process
    lives."""
    return next(iter(dist.rendezvous("env://")))[0]


def _first_rank_of_machine() -> int:
    ranks = _ranks()
    return ranks.rank - ranks.local_rank


def _ranks() -> Ranks:
    # Cluster scripts export MASTER_ADDR and MASTER_PORT even without torchrun.
    return (read_ranks(os.environ) if "WORLD_SIZE" in os.environ else None) or Ranks()
