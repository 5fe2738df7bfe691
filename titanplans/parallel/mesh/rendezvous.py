"""The rendezvous of a job's ranks, which also works after torchrun restarts them. Start at `rendezvous_store`."""

import hashlib
import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from titanplans.errors import ParallelError
from titanplans.torchrun import Ranks

_POLL_SECONDS = 0.01


def rendezvous_store(ranks: Ranks, timeout: timedelta) -> dist.Store | None:
    """Open a store whose keys only the ranks that run now use; None if torch opens a new store for each start anyway.

    torchrun has one store for all restarts of a job, in which each rank publishes its address under the same key. So a
    restarted rank could read addresses of ranks that no longer run. To avoid this, the ranks agree on a prefix for their
    keys after each start and restart.

    Raises:
        ParallelError: the launcher's store is gone, or not all ranks connect within `timeout`.
    """
    if ranks.world_size == 1:
        return dist.HashStore()  # needs no address and no port
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None  # without torchrun's agent rank 0 creates a new store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _refuse_gone(host, port)
    store = dist.TCPStore(host, port, ranks.world_size, is_master=False, timeout=timeout)
    return dist.PrefixStore(_agree_on_prefix(store, ranks, timeout), store)


def _refuse_gone(host: str, port: int) -> None:
    """Raise an error if nothing listens at the address. The launcher started before this rank, so retrying, as torch does
    for minutes, would not help."""
    try:
        socket.create_connection((host, port), timeout=10.0).close()
    except ConnectionRefusedError as error:
        raise ParallelError(
            f"MASTER_ADDR = {host}, MASTER_PORT = {port}: the launcher that started this rank is gone: start the job again"
        ) from error
    except OSError:
        pass  # the network may be slow: torch retries until its timeout


def _agree_on_prefix(store: dist.Store, ranks: Ranks, timeout: timedelta) -> str:
    """Return a prefix that all running ranks have agreed on.

    Each rank publishes a random name, reads the names of all ranks, and increments a counter under the hash of that list.
    The prefix is agreed on when all ranks have counted the same list. Ranks never agree on a list with the name of a rank
    that no longer runs, since the restarted rank has a new name. torchrun's count of restarts can't be the prefix: the
    agents of several machines count separately, and do not count the restart that follows when a machine joins.
    """
    names = [f"titanplans/names/{rank}" for rank in range(ranks.world_size)]
    store.set(names[ranks.rank], uuid.uuid4().hex[:16])
    confirmed = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if store.check(names):
            start = "titanplans/" + hashlib.sha256(b"".join(store.multi_get(names))).hexdigest()[:16]
            if start not in confirmed and store.add(f"{start}/ranks", 1) == ranks.world_size:
                store.set(f"{start}/all", "")
            confirmed.add(start)
            if store.check([f"{start}/all"]):
                return start
        time.sleep(_POLL_SECONDS)  # not store.wait, which logs a warning when it times out
    raise ParallelError(
        f"fewer than {ranks.world_size} ranks connected within {timeout.total_seconds():.0f} s: start the missing "
        "machine, or raise [comm] init_timeout_seconds, the time that the other ranks wait"
    )
