"""The process group around a job: brought up from torchrun's variables or for one process, and torn down.

    with process_group() as process:
        model.to(process.device)

Here are the backend, the device and the CPU threads of this process. How the processes are arranged
into axes is in mesh.py.
"""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from titanplans.errors import ParallelError
from titanplans.parallel.mesh.rendezvous import own_store
from titanplans.torch_private.distributed import abort_process_group
from titanplans.torchrun import Ranks, read_ranks


@dataclass(frozen=True)
class Process:
    """This process among the others."""

    device: torch.device
    """Its own device, with an index unless it is the CPU."""
    rank: int
    """0 to `world_size` - 1."""
    world_size: int
    """Processes in all."""
    local_rank: int
    """0 to `local_world_size` - 1."""
    local_world_size: int
    """Processes on this machine."""


@contextmanager
def process_group(
    device_type: str | None = None,
    *,
    cpu_offload: bool = False,
    timeout: timedelta = timedelta(minutes=10),
    threads: int | Literal["auto"] = "auto",
) -> Iterator[Process]:
    """Bring the default process group up for the body, and down after it, however it ends.

    Under torchrun the processes are torchrun's. With none of its variables set there is one process,
    which needs no address and no port.

    After an exception, Ctrl-C included, the group is aborted, not closed: nobody waits for a rank that
    will not come, and ranks that wait for this one get an error. A Ctrl-C that arrives during the
    tear-down takes effect after it, by the handler that was there before.

    Args:
        device_type: "cuda", "cpu", …; None for the accelerator that torch sees, or else the CPU.
        cpu_offload: also initialize gloo, for tensors on the CPU, next to the accelerator's backend.
        timeout: of every collective of the default group; `Mesh` gives its groups the same.
        threads: intra-op CPU threads of this process, until the end of the body. "auto": the cores of
            this process' affinity mask, shared evenly by the ranks of the machine. With OMP_NUM_THREADS
            set, "auto" leaves the number as it is; but a 1 that torchrun has set itself, which it does
            wherever a machine has several ranks, does not count.

    Raises:
        ParallelError: a group is already initialized; torchrun's variables are set in part or make no sense; the
            device is not there; `threads` or `timeout` is not positive.
    """
    if dist.is_initialized():
        raise ParallelError(
            f"a process group is already initialized ({dist.get_backend()}, {dist.get_world_size()} ranks): "
            "use it, or call destroy_process_group() first"
        )
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ParallelError(f"timeout = {timeout}: give a time above 0, as datetime.timedelta(minutes=10)")
    process = _process(device_type or default_device_type(), os.environ)
    number = _threads(threads, process.local_world_size, os.environ)
    backend = backend_for(process.device.type, cpu_offload=cpu_offload)
    threads_before = torch.get_num_threads()
    try:
        if process.device.type != "cpu":
            torch.accelerator.set_device_index(process.device)
        if number is not None:
            torch.set_num_threads(number)
        start_process_group(backend, timeout)
        yield process
    except BaseException:
        with _sigint_deferred():
            if dist.is_initialized():
                abort_process_group()
        raise
    else:
        with _sigint_deferred():
            if dist.is_initialized():  # the body may have destroyed it
                dist.destroy_process_group()
    finally:
        torch.set_num_threads(threads_before)


def start_process_group(backend: str, timeout: timedelta) -> None:
    """Start the default group of the ranks that torchrun's variables name, or of this process alone.

    Raises:
        ParallelError: the ranks of this start do not find each other.
    """
    ranks = read_ranks(os.environ) or Ranks()
    arguments: dict[str, Any] = {"backend": backend, "timeout": timeout}
    if (store := own_store(ranks, timeout)) is not None:
        arguments |= {"store": store, "rank": ranks.rank, "world_size": ranks.world_size}
    # Without device_id: bound to a device, NCCL would make each sub-group a collective of the whole world.
    dist.init_process_group(**arguments)


def local_device() -> torch.device:
    """Return the device that LOCAL_RANK gives this process, and make an accelerator torch's current one.

    Raises:
        ParallelError: this process does not see so many devices.
    """
    # Some launchers show each process its own device alone.
    is_alone = torch.accelerator.device_count() == 1
    device = _device(default_device_type(), 0 if is_alone else int(os.environ.get("LOCAL_RANK", "0")))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    return device


def default_device_type() -> str:
    """Return the type of the accelerator that torch sees, or "cpu"; "mps" has no collectives and counts as none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def backend_for(device_type: str, *, cpu_offload: bool = False) -> str:
    """Return the backend as `init_process_group` takes it, e.g. "gloo", "nccl", "cpu:gloo,cuda:nccl".

    Raises:
        ParallelError: torch knows no collectives for `device_type`.
    """
    backends = dist.Backend.default_device_backend_map
    if device_type not in backends:
        raise ParallelError(f"device_type = {device_type!r}: torch has collectives for {', '.join(backends)}")
    if device_type == "cpu" or not cpu_offload:
        return backends[device_type]
    return f"cpu:{backends['cpu']},{device_type}:{backends[device_type]}"


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on (its affinity mask, where there is one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads(threads: int | str, ranks: int, environ: Mapping[str, str]) -> int | None:
    """Return the number of threads to set; None to leave it."""
    if threads != "auto":
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise ParallelError(f"threads = {threads!r}: a whole number, 1 or more, or 'auto'")
        return threads
    omp = environ.get("OMP_NUM_THREADS")
    torchruns_own = omp == "1" and "TORCHELASTIC_RUN_ID" in environ and ranks > 1
    if omp is not None and not torchruns_own:
        return None
    return max(1, available_cores() // ranks)


def _process(device_type: str, environ: Mapping[str, str]) -> Process:
    ranks = read_ranks(environ) or Ranks()
    return Process(_device(device_type, ranks.local_rank), *ranks)


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:
        seen = "none" if accelerator is None else accelerator.type
        raise ParallelError(
            f"device_type = {device_type!r}, but the accelerator torch sees is {seen}: use 'cpu'"
        )
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ParallelError(
            f"LOCAL_RANK = {local_rank}, but this process sees {count} {device_type} devices: "
            f"start at most {count} ranks on this machine"
        )
    return torch.device(device_type, local_rank)


@contextmanager
def _sigint_deferred() -> Iterator[None]:
    """Hold a Ctrl-C back until the body is over; then the handler that was there before gets it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # signals are the main thread's; a handler that Python did not install can't be put back
        return
    arrived: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)
