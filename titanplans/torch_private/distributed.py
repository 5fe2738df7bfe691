"""Process groups: their backends, stores and timeouts."""

import warnings
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group

if hasattr(dist, "set_timeout"):  # public from torch 2.14 on
    set_group_timeout = dist.set_timeout
else:
    from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout

__all__ = [
    "abort_process_group",
    "backend_all_gather",
    "backend_of",
    "backend_reduce_scatter",
    "default_store",
    "default_timeout",
    "fake_store",
    "group_device_types",
    "resolve_process_group",
    "set_group_timeout",
]


def backend_of(group: str, device: torch.device) -> Any:
    """Return the backend of the process group named `group` for `device`, such as NCCL's or gloo's.

    Calling the backend directly avoids the dispatch of an operator, which takes longer than the call itself.
    """
    return resolve_process_group(group)._get_backend(device)  # pyrefly: ignore[bad-argument-type]


def backend_all_gather(backend: Any, full: torch.Tensor, x: torch.Tensor, options: Any) -> dist.Work | None:
    """Gather `x` of all ranks into `full`; return the work, or None from NCCL if the call is synchronous."""
    return backend._allgather_base(full, x, options)


def backend_reduce_scatter(
    backend: Any, shard: torch.Tensor, x: torch.Tensor, options: Any
) -> dist.Work | None:
    """Write this rank's shard of the sum of `x` over the ranks into `shard`; return the work as `backend_all_gather`."""
    return backend._reduce_scatter_base(shard, x, options)


def group_device_types() -> list[str]:
    """Return the device types that the default process group has a backend for."""
    return [device.type for device in dist.distributed_c10d._get_default_group()._device_types]


def default_store() -> dist.Store:
    """Return the rendezvous store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def default_timeout(device_type: str) -> timedelta | None:
    """Return the default group's timeout; None for a fake group, which has none."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    options = getattr(backend, "options", None)
    return None if options is None else options._timeout


def fake_store() -> dist.Store:
    """Return the store of a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Enable symmetric memory for `group`. Deprecated in torch 2.13, but async TP still needs it (pytorch #193027)."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def pretend_symmetric_memory(group_name: str) -> AbstractContextManager[None]:
    """Return a context in which Inductor treats the group as one with symmetric memory."""
    from torch.distributed._symmetric_memory import _test_mode

    return _test_mode({group_name})
