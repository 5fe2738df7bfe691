"""The processes of a proof: this one, or a process group that torchrun started."""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from titanplans.errors import VerifyError
from titanplans.parallel.mesh.process_group import process_group

# Ranks of a wrong plan may wait for each other: they fail after this time instead of torch's half hour.
_PATIENCE = timedelta(minutes=5)


def check_launch(request: Namespace) -> None:
    """Refuse torchrun without a process group or the reverse, and degrees that are not its size, by a VerifyError."""
    grouped = request.ranks == "process_group"
    started = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if started and not grouped:
        raise VerifyError(
            f"torchrun started {size} processes, and each would hold all ranks: add --process-group, or leave torchrun out"
        )
    if grouped and not started:
        degree = request.degrees[0].sharing if request.degrees else 2
        raise VerifyError(
            "--process-group needs the processes that torchrun starts: "
            f"torchrun --nproc-per-node {degree} -m titanplans {request.words}"
        )
    cuts = request.degrees or ()
    if grouped and any(cut.sharing != size for cut in cuts):
        said = ", ".join(map(str, cuts))
        raise VerifyError(f"{said}: torchrun started {size} processes; start as many as tp x cp")
    if grouped and size == 1 and not cuts:
        raise VerifyError(
            "--process-group with 1 process splits nothing: start as many as the degree, --nproc-per-node 2, or say --tp 1"
        )


@contextmanager
def started_ranks(request: Namespace) -> Iterator[torch.device]:
    """Give the device of this process's ranks; set up the process group if one was asked for, and take it down."""
    if request.ranks != "process_group":
        yield torch.device("cpu")
        return
    with process_group(timeout=_PATIENCE) as process:
        if process.device.type != "cpu":
            # Matrix products in full float32: TF32 keeps 10 bits of 23. titanplans/cli/main.py sets Triton's.
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
        yield process.device
