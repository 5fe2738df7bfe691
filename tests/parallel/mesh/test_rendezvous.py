"""The ranks of a start find each other, although the store still has the addresses of an earlier start."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from titanplans.errors import ParallelError
from titanplans.parallel.mesh.rendezvous import rendezvous_store
from titanplans.torchrun import Ranks

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def server(monkeypatch):
    """The store of torchrun's agent, which lives longer than the ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    return server


def stores(pool, ranks, size):
    return [pool.submit(rendezvous_store, Ranks(rank, size, rank, size), TIMEOUT) for rank in ranks]


@pytest.mark.usefixtures("server")
def test_a_start_ignores_the_one_before_and_waits_for_all_of_its_ranks():
    with ThreadPoolExecutor(8) as pool:
        for index, size in enumerate((3, 3, 2)):  # in the last start one machine is gone
            (first,) = stores(pool, [0], size)
            with pytest.raises(TimeoutError):  # the addresses of the earlier start are not used
                first.result(timeout=0.5)
            others = stores(pool, range(1, size), size)
            by_rank = [future.result(timeout=60) for future in (first, *others)]
            assert not any(store.check(["address"]) for store in by_rank)
            by_rank[0].set("address", str(index))
            assert {store.get("address") for store in by_rank} == {str(index).encode()}


def test_a_launcher_that_has_ended_is_not_waited_for(server, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ParallelError, match=r"MASTER_PORT = 1: the launcher .*gone"):
        rendezvous_store(Ranks(0, 2, 0, 2), TIMEOUT)


@pytest.mark.usefixtures("server")
def test_a_missing_rank_is_waited_for_until_the_timeout():
    with pytest.raises(ParallelError, match=r"fewer than 2 ranks .*within 1 s"):
        rendezvous_store(Ranks(0, 2, 0, 2), timedelta(seconds=1))


def test_other_init_methods_are_those_of_torch(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert rendezvous_store(Ranks(0, 2, 0, 2), TIMEOUT) is None
    assert isinstance(rendezvous_store(Ranks(), TIMEOUT), dist.HashStore)
