"""Ranks of one start find each other, whoever has left an address in the store before."""

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
    """The store of torchrun's agent, which outlives the ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    return server


def stores(pool, ranks, size):
    return [pool.submit(rendezvous_store, Ranks(rank, size, rank, size), TIMEOUT) for rank in ranks]


@pytest.mark.usefixtures("server")
def test_a_start_reads_nothing_of_the_one_before_and_waits_for_all_of_its_own():
    with ThreadPoolExecutor(8) as pool:
        for number, size in enumerate((3, 3, 2)):  # a machine has left
            (first,) = stores(pool, [0], size)
            with pytest.raises(TimeoutError):  # the names of those who were there before are not enough
                first.result(timeout=0.5)
            others = stores(pool, range(1, size), size)
            own = [future.result(timeout=60) for future in (first, *others)]
            assert not any(store.check(["address"]) for store in own)
            own[0].set("address", str(number))
            assert {store.get("address") for store in own} == {str(number).encode()}


def test_a_launcher_that_is_gone_is_not_waited_for(server, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ParallelError, match=r"MASTER_PORT = 1: the launcher .*gone"):
        rendezvous_store(Ranks(0, 2, 0, 2), TIMEOUT)


@pytest.mark.usefixtures("server")
def test_a_rank_that_is_missing_is_waited_for_so_long():
    with pytest.raises(ParallelError, match=r"fewer than 2 ranks .*within 1 s"):
        rendezvous_store(Ranks(0, 2, 0, 2), timedelta(seconds=1))


def test_other_ways_are_torchs_own(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert rendezvous_store(Ranks(0, 2, 0, 2), TIMEOUT) is None
    assert isinstance(rendezvous_store(Ranks(), TIMEOUT), dist.HashStore)
