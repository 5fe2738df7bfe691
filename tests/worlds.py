"""Real process groups for tests: `run(fn, ranks)` starts that many processes over gloo, once a file.

`fn(rank)` runs on every rank with the group up; what rank 0 returns is returned. A failure on any
rank fails the test with that rank's traceback.
"""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(fn: Callable[[int], Any], ranks: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(fn, ranks, folder), nprocs=ranks)
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def _work(rank: int, fn: Callable[[int], Any], ranks: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{folder}/store")
    try:
        result = fn(rank)
        if rank == 0:
            torch.save(result, Path(folder) / "result.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
