"""From the command line to an exit status.

0          proved; all fused that can be; or printed
1          wrong; or not all fused
2          not possible as written: one line says why
128 + N    stopped by signal N
"""

import gc
import itertools
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import TYPE_CHECKING

from titanplans.cli.verify.arguments import parse
from titanplans.errors import VerifyError
from titanplans.training.launch.logs import init_logging
from titanplans.training.launch.signals import Stopped, stop_on_signals

# Mistakes in the command line are reported before torch and the model libraries are imported.
if TYPE_CHECKING:
    import torch

_PATIENCE = timedelta(minutes=5)
"""Ranks of a wrong plan may wait for each other: they fail after this time instead of torch's half hour."""


def main(argv: list[str]) -> int:
    """Run the command line `argv` (see `titanplans.cli.verify.arguments`); return the exit status, or raise a UserError."""
    alone = "torch" not in sys.modules  # nothing has used it before, so this process may be forked
    rank = int(os.environ.get("RANK", "0"))
    with stop_on_signals():
        request = parse(argv)
        if request.command == "list":
            from titanplans.cli.listing import listing, long_listing

            names = request.model_types
            print(long_listing(names) if names or request.long else listing())
            return 0
        with redirect_stdout(sys.stderr):  # libraries' logs: stdout is the result's
            init_logging(rank)
        if request.command == "async-tp":
            from titanplans.cli.async_tp import main as async_tp

            return async_tp(request)
        return _verify(request, rank, alone)


def _verify(request: Namespace, rank: int, alone: bool) -> int:
    gc.set_threshold(
        100_000
    )  # imports and trainings leave little garbage; looking for it takes a sixth of the time
    _check_launch(request)
    with _started_ranks(request) as device:
        if request.kernels == "real":
            _interpret(device.type)
        import torch

        from titanplans import kernels
        from titanplans.cli.verify.proof import Outcome, prove
        from titanplans.cli.verify.screen import Results, progress, subject_result
        from titanplans.cli.verify.subject import every_model, find_subject
        from titanplans.parallel.mesh.process_group import available_cores
        from titanplans.proof.ranks.processes import OnUpdate, run_in_processes

        names = every_model() if request.all else [request.subject or ""]
        forks = alone and request.ranks == "threads" and device.type == "cpu"  # CUDA survives no fork
        processes = min(available_cores(), len(names)) if forks else 1
        if processes > 1:
            torch.set_num_threads(1)  # a pool of threads does not survive a fork

        def proved(turns: Iterator[int], tell: OnUpdate) -> list[bool]:
            found = []
            for at in turns:

                def watch(outcome: Outcome, at: int = at) -> None:
                    if rank == 0:
                        tell(subject_result(at, outcome))

                shown = rank == 0 and processes == 1
                with redirect_stdout(sys.stderr), progress(names[at], shown=shown) as show:
                    subject = find_subject(names[at], request)
                    own = subject.config is None or kernels.calls_fla(subject.config)
                    if own or "fla" in sys.modules:  # FLA takes a second to import
                        kernels.install(device.type)
                    outcome = prove(subject, request, device, show, watch, fork=forks and not request.all)
                watch(outcome)
                found.append(outcome.report.passed)
            return found

        with progress("verify", shown=rank == 0) as show:
            results = Results(request, names, rank, show)
            # One model's cases are proved side by side, or else several models.
            try:
                results.write()
                parts = run_in_processes(proved, len(names), processes, results.update)
            except Stopped:
                results.end(stopped=True)
                raise
    results.end()
    return 0 if all(itertools.chain(*parts)) else 1


def _check_launch(request: Namespace) -> None:
    """Refuse torchrun without a process group or the reverse, and degrees that are not its size, by a VerifyError."""
    grouped, size = request.ranks == "process_group", int(os.environ.get("WORLD_SIZE", "1"))
    cuts = request.degrees or ()
    if grouped != ({"RANK", "WORLD_SIZE"} <= os.environ.keys()):
        group = "" if grouped else " --process-group"
        degree = cuts[0].tp_cp if cuts else 2
        raise VerifyError(
            "--process-group goes with torchrun, which starts a process for each rank, and torchrun with --process-group: "
            f"torchrun --nproc-per-node {degree} -m titanplans {request.words}{group}"
        )
    if grouped and (any(cut.tp_cp != size for cut in cuts) or (size == 1 and not cuts)):
        said = ", ".join(map(str, cuts)) or "--process-group"
        raise VerifyError(
            f"{said}: torchrun started {size} processes; start as many as tp x cp, two at least, or say --tp 1 for one"
        )


@contextmanager
def _started_ranks(request: Namespace) -> Iterator["torch.device"]:
    """Give the device of this process's ranks; set up the process group if one was asked for, and take it down."""
    import torch

    from titanplans.parallel.mesh.process_group import process_group

    # Matrix products in full float32: TF32 keeps 10 bits of 23. titanplans/cli/main.py sets Triton's.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if request.ranks != "process_group":
        if request.device == "cuda" and not torch.cuda.is_available():
            raise VerifyError("--device cuda: torch sees no CUDA device here; leave it out for the CPU")
        yield torch.device(request.device or "cpu")
        return
    with process_group(timeout=_PATIENCE) as process:
        yield process.device


def _interpret(device_type: str) -> None:
    """Let Triton's kernels run on a CPU, and say how long it takes."""
    if device_type != "cpu":
        raise VerifyError(
            f"--kernels real: on {device_type} Triton's kernels run by themselves; leave it out"
        )
    from titanplans.kernels import interpreted

    print(
        "--kernels real: Triton's kernels are interpreted, some hundred times slower than their stand-ins: minutes a model "
        "(--quick --tp 2 is the shortest proof)",
        file=sys.stderr,
    )
    interpreted.start()
    interpreted.widen()
