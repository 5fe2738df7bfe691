"""The commands `verify`, `list` and `async-tp`. Exit status:

0          verify: proved; async-tp: everything is fused that can be fused; list: printed
1          verify: the plan is wrong; async-tp: something is not fused that can be fused
2          the command can't be run as written; one line says why
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

_TIMEOUT = timedelta(minutes=5)
"""Timeout of collectives. Ranks of a wrong plan may wait for each other, and torch's default is 30 minutes."""


def main(argv: list[str]) -> int:
    """Run the command line `argv` (see `titanplans.cli.verify.arguments`); return the exit status.

    Raises:
        UserError: the command can't be run as written.
    """
    can_fork = "torch" not in sys.modules  # torch has no threads yet, which would not survive a fork
    rank = int(os.environ.get("RANK", "0"))
    with stop_on_signals():
        request = parse(argv)
        if request.command == "list":
            from titanplans.cli.listing import listing, long_listing

            names = request.model_types
            print(long_listing(names) if names or request.long else listing())
            return 0
        with redirect_stdout(sys.stderr):  # logs go to stderr; stdout is for the result
            init_logging(rank)
        if request.command == "async-tp":
            from titanplans.cli.async_tp import main as async_tp

            return async_tp(request)
        return _verify(request, rank, can_fork)


def _verify(request: Namespace, rank: int, can_fork: bool) -> int:
    # At the default threshold garbage collection takes a sixth of the time, although there is little garbage.
    gc.set_threshold(100_000)
    _check_launch(request)
    with _started_ranks(request) as device:
        if request.kernels == "real":
            _use_interpreter(device.type)
        import torch

        from titanplans import kernels
        from titanplans.cli.verify.proof import Outcome, prove
        from titanplans.cli.verify.screen import Results, progress, subject_result
        from titanplans.cli.verify.subject import every_model, find_subject
        from titanplans.parallel.mesh.process_group import available_cores
        from titanplans.proof.ranks.processes import OnUpdate, run_in_processes

        names = every_model() if request.all else [request.subject or ""]
        # CUDA can't be used in a forked process.
        forks = can_fork and request.ranks == "threads" and device.type == "cpu"
        # With --all several models are proved in parallel; otherwise `prove` proves the cases of one model in parallel.
        processes = min(available_cores(), len(names)) if forks else 1
        if processes > 1:
            torch.set_num_threads(1)  # a pool of threads does not survive a fork

        def prove_models(indices: Iterator[int], report_update: OnUpdate) -> list[bool]:
            are_right = []
            for index in indices:

                def watch(outcome: Outcome, index: int = index) -> None:
                    if rank == 0:
                        report_update(subject_result(index, outcome))

                shown = rank == 0 and processes == 1
                with redirect_stdout(sys.stderr), progress(names[index], shown=shown) as show:
                    subject = find_subject(names[index], request)
                    may_use_fla = subject.config is None or kernels.calls_fla(subject.config)
                    # `install` imports FLA, which takes a second.
                    if may_use_fla or "fla" in sys.modules:
                        kernels.install(device.type)
                    outcome = prove(subject, request, device, show, watch, fork=forks and not request.all)
                watch(outcome)
                are_right.append(outcome.report.passed)
            return are_right

        with progress("verify", shown=rank == 0) as show:
            results = Results(request, names, rank, show)
            try:
                results.write()
                by_process = run_in_processes(prove_models, len(names), processes, results.update)
            except Stopped:
                results.end(stopped=True)
                raise
    results.end()
    return 0 if all(itertools.chain(*by_process)) else 1


def _check_launch(request: Namespace) -> None:
    """Refuse torchrun without --process-group, --process-group without torchrun, and a process group whose size is not tp
    x cp."""
    uses_group, size = request.ranks == "process_group", int(os.environ.get("WORLD_SIZE", "1"))
    requested = request.degrees or ()
    if uses_group != ({"RANK", "WORLD_SIZE"} <= os.environ.keys()):
        flag = "" if uses_group else " --process-group"
        ranks = requested[0].tp_cp if requested else 2
        raise VerifyError(
            "--process-group needs torchrun, which starts a process for each rank, and torchrun needs --process-group: "
            f"torchrun --nproc-per-node {ranks} -m titanplans {request.words}{flag}"
        )
    if uses_group and (any(degrees.tp_cp != size for degrees in requested) or (size == 1 and not requested)):
        option = ", ".join(map(str, requested)) or "--process-group"
        raise VerifyError(
            f"{option}: torchrun started {size} processes: start tp x cp processes, at least two, or set "
            "--tp 1 for one process"
        )


@contextmanager
def _started_ranks(request: Namespace) -> Iterator["torch.device"]:
    """Yield the device of this process's ranks. If a process group is requested, it exists inside the body."""
    import torch

    from titanplans.parallel.mesh.process_group import process_group

    # Matrix products run in full float32, since TF32 keeps 10 of 23 mantissa bits. titanplans/cli/main.py does this for
    # Triton.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if request.ranks != "process_group":
        if request.device == "cuda" and not torch.cuda.is_available():
            raise VerifyError("--device cuda: torch finds no CUDA device: leave it out to use the CPU")
        yield torch.device(request.device or "cpu")
        return
    with process_group(timeout=_TIMEOUT) as process:
        yield process.device


def _use_interpreter(device_type: str) -> None:
    """Run Triton kernels with Triton's interpreter on the CPU, and print a warning about the time."""
    if device_type != "cpu":
        raise VerifyError(
            f"--kernels real: on {device_type} the Triton kernels always run: leave --kernels out"
        )
    from titanplans.kernels import interpreted

    print(
        "--kernels real: Triton kernels are interpreted, some hundred times slower than their stand-ins, and a model takes "
        "minutes (--quick --tp 2 is the shortest proof)",
        file=sys.stderr,
    )
    interpreted.start()
    interpreted.widen()
