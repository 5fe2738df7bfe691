"""Operators that communicate: what each does, over which ranks, how much of it a rank receives.

The names are those of torch's dispatcher, of the functional collectives (`_c10d_functional`), of process groups (`c10d`),
and of DTensor. Who counts what is issued is elsewhere: `titanplans.proof.traffic` for a proof, others in training.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor
from torch.utils._pytree import tree_leaves

NAMESPACES = ("_c10d_functional", "c10d_functional", "c10d", "_dtensor")
"""Where these operators are registered."""

_OPERATIONS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "receive",
    "p2p": "send",
}
"""Part of an operator's name, underscores aside, and what it does; the first that fits."""

_NO_DATA = (
    "wait_tensor",
    "_wrap_tensor_autograd",
    "barrier",
    "monitored_barrier_",
    "check_for_nan",
    "mesh_get_process_group",
)

_RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2, "min_reduce": 2}


def received(operation: str, size: int, ranks: int) -> int:
    """Return the bytes that each rank receives on a ring: the other ranks' shares, and in an all-reduce twice.

    (n-1)/n and 2(n-1)/n of the whole (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce
    algorithms"); for an operation to or from a single rank, the whole.

    Args:
        operation: as `operation_of` has it.
        size: bytes of the whole tensor.
        ranks: size of the process group.
    """
    passes = _RING_PASSES.get(operation)
    return size if passes is None else passes * size * (ranks - 1) // ranks


def operation_of(func: Any, args: Any = ()) -> str | None:
    """Return what the operator does with `args`, such as all_gather, reduce_scatter, all_reduce; None if it sends nothing.

    Raises:
        NotImplementedError: an operator that is not known here.
    """
    name = func._schema.name.partition("::")[2]
    if name in _NO_DATA:
        return None
    plain = name.replace("_", "")
    for part, operation in _OPERATIONS.items():
        if part in plain:
            # A functional one names its reduction second; there a process group's own has the group.
            reduction = args[1] if len(args) > 1 and isinstance(args[1], str) else None
            return "min_reduce" if operation == "all_reduce" and reduction == "min" else operation
    raise NotImplementedError(f"operator {func} is not known here, so its bytes would go uncounted")


def size_of(argument: Any) -> tuple[int, int]:
    """Return elements and bytes of a tensor or a list of them; of simulated ranks, the largest's."""
    tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
    elements = [
        max(t.numel() for t in x._local_tensors.values()) if isinstance(x, LocalTensor) else x.numel()
        for x in tensors
    ]
    return sum(elements), sum(n * x.element_size() for n, x in zip(elements, tensors, strict=True))


def ranks_of(func: Any, args: Any, kwargs: Any) -> int:
    """Return the size of the process group that a collective operator was given."""
    given = _given(func, args, kwargs)
    return given["group_size"] if "group_size" in given else group_of(func, args, kwargs).size()


def group_of(func: Any, args: Any, kwargs: Any) -> dist.ProcessGroup:
    """Return the process group that a collective operator was given, by name or as it is."""
    given = _given(func, args, kwargs)
    group = next(value for name, value in given.items() if name in ("group_name", "process_group"))
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # pyrefly: ignore[bad-argument-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
