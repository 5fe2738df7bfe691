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
    grouped, size = request.ranks == "process_group", int(os.environ.get("WORLD_SIZE", "1"))
    cuts = request.degrees or ()
    if grouped != ({"RANK", "WORLD_SIZE"} <= os.environ.keys()):
        group = "" if grouped else " --process-group"
        degree = cuts[0].sharing if cuts else 2
        raise VerifyError(
            "--process-group goes with torchrun, which starts a process for each rank, and torchrun with --process-group: "
            f"torchrun --nproc-per-node {degree} -m titanplans {request.words}{group}"
        )
    if grouped and (any(cut.sharing != size for cut in cuts) or (size == 1 and not cuts)):
        said = ", ".join(map(str, cuts)) or "--process-group"
        raise VerifyError(
            f"{said}: torchrun started {size} processes; start as many as tp x cp, two at least, or say --tp 1 for one"
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
