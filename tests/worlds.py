"""Real process groups for tests: `run(fn, ranks)` starts that many processes once a file.

`fn(rank)` runs on every rank with the group up; what rank 0 returns is returned. A failure on any
rank fails the test with that rank's traceback.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(fn: Callable[[int], Any], ranks: int, backend: str = "gloo") -> Any:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(fn, ranks, folder, backend), nprocs=ranks)
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def _work(rank: int, fn: Callable[[int], Any], ranks: int, folder: str, backend: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
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
