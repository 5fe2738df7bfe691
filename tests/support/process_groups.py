"""Real process groups for tests: `run(fn, ranks)` starts that many fresh processes, which have imported everything.

`fn(rank)` runs on every rank with the group up; what rank 0 returns is returned. A failure on any rank fails the test
with that rank's traceback; a rank that hangs prints where each of its threads is, and ends.

Ranks are forked from a server (`multiprocessing`'s forkserver, one for each process that calls `run`) that has imported
`rank_imports`, and has neither run a tensor operator nor started a thread. Python, torch and the model libraries take a
process nine seconds to import. A fork can't use CUDA that its parent has seen: where there is a GPU, ranks are spawned.
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
"""Seconds that ranks may take: pytest's own limit, which knows nothing of them, is 600."""


def run(fn: Callable[[int], Any], ranks: int, backend: str = "gloo") -> Any:
    method = start_method()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _work, args=(fn, ranks, folder, backend, dict(os.environ)), nprocs=ranks, start_method=method
        )
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def module_fixture(fn: Callable[[int], Any], ranks: int) -> Any:
    """Return a fixture: what rank 0 returns of `fn`, run once for all tests of a file."""
    return pytest.fixture(scope="module")(lambda: run(fn, ranks))


class CaseResults(dict[Any, Any]):
    """What rank 0 returned for each case. Getting a case that failed raises its failure."""

    failures: dict[Any, Exception]

    def __missing__(self, case: Any) -> Any:
        raise self.failures[case]


def case_fixture(cases: Callable[[int], dict[Any, Callable[[], Any]]], ranks: int) -> Any:
    """Return a fixture: the `CaseResults` of the functions that `cases(rank)` returns by name, run once for a file.

    The cases run one after another in one process group. If one fails, each runs again in a group of its own, so that
    only the tests of the failing cases fail.
    """

    def results() -> CaseResults:
        try:
            return CaseResults(run(functools.partial(_run_cases, cases=cases), ranks))
        except mp.ProcessRaisedException:
            results = CaseResults()
        results.failures = {}
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
    """Return what rank 0 returns of `work(rank)` on ranks that are threads of this process."""
    return threads.run(ranks, torch.device("cpu"), work)


@contextlib.contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of several that do not exist: collectives give arbitrary values."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    try:
        clear_sharding_cache()  # of an equal mesh, whose group is gone, or on which this was another rank
        yield
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()


def gather_objects(value: Any) -> list[Any]:
    """Return what each rank calls this with."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@functools.cache
def start_method() -> str:
    """Start the server that ranks are forked from; "spawn" where there is a GPU."""
    if torch.cuda.is_available():
        return "spawn"
    multiprocessing.forkserver.set_forkserver_preload(["tests.support.rank_imports"])
    environment = {
        # The server imports `tests` from here, wherever it was started.
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # A pool of threads, which OpenBLAS makes when it is loaded, does not survive a fork.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        # Inductor compiles in the rank; each rank's own pool of compiling processes would import torch first.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    with mock.patch.dict(os.environ, environment):
        multiprocessing.forkserver.ensure_running()
    return "forkserver"


def _work(
    rank: int, fn: Callable[[int], Any], ranks: int, folder: str, backend: str, environment: dict[str, str]
) -> None:
    from tests.support import rank_imports  # noqa: F401  the server says nothing where this fails

    faulthandler.enable()  # a rank that a signal ends says where it was
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.environ.clear()  # a fork has that of the server
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
