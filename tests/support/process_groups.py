"""Run a function on the ranks of a real process group: `run(fn, ranks)`.

Importing Python, torch and the model libraries takes nine seconds, so ranks are forked from a server (`multiprocessing`'s
forkserver, one per process that calls `run`) that has imported `rank_imports`. The server runs no tensor operator and
starts no thread, which a fork would not survive.
"""

import contextlib
import faulthandler
import functools
import multiprocessing.forkserver
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.paths import ROOT
from titanplans.proof.ranks import threads
from titanplans.torch_private.distributed import fake_store
from titanplans.torch_private.dtensor import clear_sharding_cache

LIMIT = 540
"""Seconds that ranks may take. pytest's limit is 600, but it can't show where a rank hangs."""


def run(fn: Callable[[int], Any], ranks: int, backend: str = "gloo") -> Any:
    """Run `fn(rank)` on every rank of a process group, and return the result of rank 0.

    A failure on any rank is raised with its traceback. A rank that hangs prints the stack of each of its threads, and ends.
    """
    method = start_method()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _work, args=(fn, ranks, folder, backend, dict(os.environ)), nprocs=ranks, start_method=method
        )
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def module_fixture(fn: Callable[[int], Any], ranks: int) -> Any:
    """Return a fixture whose value is the result of `fn` on rank 0. `fn` runs once for all tests of a file."""
    return pytest.fixture(scope="module")(lambda: run(fn, ranks))


class CaseResults(dict[Any, Any]):
    """The results of rank 0 by case. Looking up a failed case raises the case's error."""

    def __init__(self, results: dict[Any, Any]):
        super().__init__(results)
        self.failures: dict[Any, Exception] = {}

    def __missing__(self, case: Any) -> Any:
        raise self.failures[case]


def case_fixture(cases: Callable[[int], dict[Any, Callable[[], Any]]], ranks: int) -> Any:
    """Return a fixture with the `CaseResults` of a test file. `cases(rank)` returns the functions to run, by case.

    The cases run one after another in one process group. If one fails, each runs again in a group of its own, so that
    only the tests of the failing cases fail.
    """

    def results() -> CaseResults:
        try:
            return CaseResults(run(functools.partial(_run_cases, cases=cases), ranks))
        except mp.ProcessRaisedException:
            results = CaseResults({})
        for case in cases(0):
            try:
                results |= run(functools.partial(_run_cases, cases=cases, only=case), ranks)
            except mp.ProcessRaisedException as failure:
                results.failures[case] = failure
        return results

    return pytest.fixture(scope="module")(results)


def _run_cases(
    rank: int, cases: Callable[[int], dict[Any, Callable[[], Any]]], only: Any = None
) -> dict[Any, Any]:
    return {name: case() for name, case in cases(rank).items() if only in (None, name)}


def run_on_threads(work: Callable[[Any], Any], ranks: int = 2) -> Any:
    """Run `work(rank)` on ranks that are threads of this process, and return the result of rank 0."""
    return threads.run(ranks, torch.device("cpu"), work)


@contextlib.contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank of a fake process group, whose collectives return arbitrary values."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    try:
        clear_sharding_cache()  # the cache may have an equal mesh of a destroyed group, or of another rank
        yield
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()


@functools.cache
def start_method() -> str:
    """Return how ranks are started. If they are forked from a server, start it."""
    if torch.cuda.is_available():  # a forked process can't use CUDA if its parent has used it
        return "spawn"
    multiprocessing.forkserver.set_forkserver_preload(["tests.support.rank_imports"])
    environment = {
        # The server imports `tests` from here, wherever it was started.
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # When OpenBLAS is loaded, it starts a pool of threads, which does not survive a fork.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        # Let Inductor compile in the rank itself, because each process of a pool would first import torch.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    with mock.patch.dict(os.environ, environment):
        multiprocessing.forkserver.ensure_running()
    return "forkserver"


def _work(
    rank: int, fn: Callable[[int], Any], ranks: int, folder: str, backend: str, environment: dict[str, str]
) -> None:
    from tests.support import rank_imports  # noqa: F401  the server hides an error of this import

    faulthandler.enable()  # a rank that is ended by a signal prints its traceback
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.environ.clear()  # a forked rank would otherwise have the environment of the server
    os.environ.update(
        environment,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
    )
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=ranks, init_method=f"file://{folder}/store")
    try:
        result = fn(rank)
        if rank == 0:
            torch.save(result, Path(folder) / "result.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
