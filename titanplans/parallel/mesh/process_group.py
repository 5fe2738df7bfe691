"""The default process group of a job, with this process' backend, device and CPU threads.

with process_group() as process:
    model.to(process.device)
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
from titanplans.parallel.mesh.rendezvous import rendezvous_store
from titanplans.torch_private.distributed import abort_process_group
from titanplans.torchrun import Ranks, read_ranks


@dataclass(frozen=True)
class Process:
    """The rank and the device of this process."""

    device: torch.device
    """The device, with an index unless it is the CPU."""
    rank: int
    """0 to `world_size` - 1."""
    world_size: int
    """Number of processes."""
    local_rank: int
    """0 to `local_world_size` - 1."""
    local_world_size: int
    """Number of processes on this machine."""


@contextmanager
def process_group(
    device_type: str | None = None,
    *,
    cpu_offload: bool = False,
    timeout: timedelta = timedelta(minutes=10),
    threads: int | Literal["auto"] = "auto",
) -> Iterator[Process]:
    """Initialize the default process group for the body of the `with`, and destroy it afterwards.

    Rank and world size come from torchrun's environment variables. If none of them is set, the group has one process, and
    needs no address and no port.

    After an exception, including Ctrl-C, the group is aborted instead of destroyed: this rank does not wait for ranks that
    have failed, and ranks that wait for this one get an error. A Ctrl-C during the teardown is handled after it.

    Args:
        device_type: "cuda", "cpu", ...; None: the accelerator that torch sees, else the CPU.
        cpu_offload: also initialize gloo, for tensors on the CPU, in addition to the accelerator's backend.
        timeout: timeout of every collective of the default group; `Mesh` sets the same for its groups.
        threads: intra-op CPU threads of this process, until the end of the body. "auto": the cores of this process'
            affinity mask divided by the number of ranks on this machine; unchanged if the user has set OMP_NUM_THREADS.

    Raises:
        ParallelError: a group is already initialized; torchrun's variables are incomplete or invalid; the device does not
            exist; `threads` or `timeout` is not positive.
    """
    if dist.is_initialized():
        raise ParallelError(
            f"a process group is already initialized ({dist.get_backend()}, {dist.get_world_size()} ranks): "
            "use it, or call destroy_process_group() first"
        )
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ParallelError(
            f"timeout = {timeout}: give a positive datetime.timedelta, such as timedelta(minutes=10)"
        )
    process = _process(device_type or default_device_type(), os.environ)
    thread_count = _thread_count(threads, process.local_world_size, os.environ)
    backend = backend_for(process.device.type, cpu_offload=cpu_offload)
    threads_before = torch.get_num_threads()
    try:
        if process.device.type != "cpu":
            torch.accelerator.set_device_index(process.device)
        if thread_count is not None:
            torch.set_num_threads(thread_count)
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
    """Initialize the default group: its ranks come from torchrun's variables, or it has only this process if none is set.

    Raises:
        ParallelError: not all ranks connect within `timeout`.
    """
    ranks = read_ranks(os.environ) or Ranks()
    arguments: dict[str, Any] = {"backend": backend, "timeout": timeout}
    if (store := rendezvous_store(ranks, timeout)) is not None:
        arguments |= {"store": store, "rank": ranks.rank, "world_size": ranks.world_size}
    # Without device_id: if NCCL is bound to a device, the creation of each subgroup is a collective over all ranks.
    dist.init_process_group(**arguments)


def local_device() -> torch.device:
    """Return the device with the index LOCAL_RANK, and make it the current one if it is an accelerator.

    Raises:
        ParallelError: this process sees fewer devices.
    """
    # Some launchers let each process see only one device, whatever its LOCAL_RANK.
    sees_one = torch.accelerator.device_count() == 1
    device = _device(default_device_type(), 0 if sees_one else int(os.environ.get("LOCAL_RANK", "0")))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    return device


def default_device_type() -> str:
    """Return the type of the accelerator that torch sees; "cpu" without one, or for "mps", which has no collectives."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def backend_for(device_type: str, *, cpu_offload: bool = False) -> str:
    """Return the backend string for `init_process_group`, such as "gloo", "nccl" or "cpu:gloo,cuda:nccl".

    Raises:
        ParallelError: torch has no backend for `device_type`.
    """
    backends = dist.Backend.default_device_backend_map
    if device_type not in backends:
        raise ParallelError(f"device_type = {device_type!r}: torch has backends for {', '.join(backends)}")
    if device_type == "cpu" or not cpu_offload:
        return backends[device_type]
    return f"cpu:{backends['cpu']},{device_type}:{backends[device_type]}"


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on, by its affinity mask if the platform has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _thread_count(threads: int | str, ranks: int, environ: Mapping[str, str]) -> int | None:
    """Return the number of threads to set; None: leave torch's number unchanged."""
    if threads != "auto":
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise ParallelError(f"threads = {threads!r}: give an integer of 1 or more, or 'auto'")
        return threads
    omp = environ.get("OMP_NUM_THREADS")
    # torchrun sets OMP_NUM_THREADS=1 itself if it starts several ranks on a machine; then the user did not choose it.
    is_set_by_torchrun = omp == "1" and "TORCHELASTIC_RUN_ID" in environ and ranks > 1
    if omp is not None and not is_set_by_torchrun:
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
            f"device_type = {device_type!r}, but the accelerator that torch sees is {seen}: use 'cpu'"
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
    """Defer a Ctrl-C until the end of the body, then pass it to the previous handler."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # only the main thread handles signals; None: a handler not installed by Python, which can't be restored
        return
    arrived: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)
