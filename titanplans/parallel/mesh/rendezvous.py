"""How the ranks of a job find each other, again after each restart.

torchrun keeps one store for all restarts of a job, and each rank that starts leaves the address at which it can be reached
under the same keys. A rank that is started again then reads addresses of ranks that are gone. So the ranks of one start
agree on a part of the store that is theirs alone.
"""

import hashlib
import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from titanplans.errors import ParallelError
from titanplans.torchrun import Ranks

_SECONDS = 0.01


def own_store(ranks: Ranks, timeout: timedelta) -> dist.Store | None:
    """Return a store that only the ranks of this start write to; None where torch's own is such a one.

    One process needs no address and no port.

    Raises:
        ParallelError: nobody is at the store's address any more.
    """
    if ranks.world_size == 1:
        return dist.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None  # rank 0 makes a new one
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _refuse_gone(host, port)
    store = dist.TCPStore(host, port, ranks.world_size, is_master=False, timeout=timeout)
    return dist.PrefixStore(_this_start(store, ranks, timeout), store)


def _refuse_gone(host: str, port: int) -> None:
    """Refuse an address where nobody listens: torch would try it for minutes, and it was there before this rank."""
    try:
        socket.create_connection((host, port), timeout=10.0).close()
    except ConnectionRefusedError as error:
        raise ParallelError(
            f"MASTER_ADDR = {host}, MASTER_PORT = {port}: the launcher that has started this rank is gone"
        ) from error
    except OSError:
        pass  # a network that is slow: torch waits for it


def _this_start(store: dist.Store, ranks: Ranks, timeout: timedelta) -> str:
    """Return a name that the ranks which run now have agreed upon.

    Each leaves a random name of its own, reads the names of all, and says so under their hash. A list with the name of a
    rank that is gone is never confirmed by all, since its successor has another name. Counting restarts would not do:
    agents of several machines count apart, and do not count the restarts after a machine has joined.
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
        time.sleep(_SECONDS)  # a wait of the store's own would log that it has ended
    raise ParallelError(
        f"fewer than {ranks.world_size} ranks connected within {timeout.total_seconds():.0f} s: start the missing "
        "machine, or raise [comm] init_timeout_seconds, for which the others wait"
    )
