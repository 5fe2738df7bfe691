"""Operators that communicate: what each does, over which ranks, and how many bytes a rank receives.

The one table and the one ring formula: the recorder (`recorder`) looks up operators as they run, the graph reader
(`graphs`) those of compiled graphs. Names are those of torch's dispatcher: functional collectives (`_c10d_functional`),
process groups (`c10d`), DTensor, and symmetric memory, whose fused operators multiply matrices meanwhile.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from titanplans.torch_private.dispatch import schema, tree_leaves
from titanplans.torch_private.distributed import resolve_process_group

Phase = Literal["forward", "backward", "recomputed", "update", "log"]
"""recomputed: a forward again, for the backward. update: after the last backward. log: see `ModuleTracker.log_begins`."""

NAMESPACES = ("_c10d_functional", "c10d_functional", "c10d", "_dtensor", "symm_mem")
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
"""Part of an operator's name, underscores aside, and the operation; the first that fits."""

_NO_DATA = (
    "wait_tensor",
    "_wrap_tensor_autograd",
    "barrier",
    "monitored_barrier_",
    "check_for_nan",
    "mesh_get_process_group",
)

_RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}


class Collective(NamedTuple):
    """One collective, as one rank issues it."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, ..."""

    reduction: str | None
    """sum, avg, min, ... of a functional collective that reduces; None: not known."""

    group: tuple[int, ...]
    """The ranks that take part."""

    elements: int | None
    """Of the whole tensor that is gathered, summed or scattered; None: a graph has symbolic sizes."""

    bytes: int | None
    """Of the whole tensor."""

    fused: bool
    """Issued by an operator that multiplies matrices meanwhile (async tensor parallelism)."""

    module: str | None = None
    """The innermost module whose forward or backward issues it, by its fully qualified name; for FSDP2 the first module of
    the unit. "" is the model itself; None is outside of the model, or not known."""

    phase: Phase = "forward"

    of_unit: bool = False
    """Issued by a unit of FSDP2."""

    overlapped: bool = False
    """Of a compiled graph's: products stand between it and its wait, which need nothing of it."""

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.group)

    @property
    def received(self) -> int | None:
        """Bytes that a rank receives on a ring."""
        return None if self.bytes is None else received(self.operation, self.bytes, self.ranks)


def received(operation: str, size: int, ranks: int) -> int:
    """Return the bytes that each rank receives on a ring of `ranks`, of a whole tensor of `size` bytes.

    (n-1)/n and, in an all-reduce, 2(n-1)/n of the whole (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce
    algorithms"); for an operation to or from a single rank, the whole.
    """
    passes = _RING_PASSES.get(operation)
    return size if passes is None else passes * size * (ranks - 1) // ranks


def operation_of(func: Any) -> str | None:
    """Return what the operator does, such as all_gather, reduce_scatter, all_reduce; None if it sends nothing.

    Raises:
        NotImplementedError: a communication operator that is not in the table.
    """
    namespace, _, name = schema(func).name.partition("::")
    if namespace not in NAMESPACES or name in _NO_DATA:
        return None
    plain = name.replace("_", "")
    operation = next((operation for part, operation in _OPERATIONS.items() if part in plain), None)
    if operation is None and namespace != "symm_mem":  # which has much besides: barriers, handles, products
        raise NotImplementedError(f"{func} is not in the table of operators, so its bytes can't be counted")
    return operation


def is_fused(func: Any) -> bool:
    """Whether the operator is a collective that multiplies matrices meanwhile."""
    return schema(func).name.startswith("symm_mem::fused_")


def describe(func: Any, args: Any, kwargs: Any, result: Any) -> Collective | None:
    """Return the collective that the operator issues with these tensors, real or fake; None if it sends nothing."""
    operation = operation_of(func)
    if operation is None:
        return None
    given = dict(zip((a.name for a in schema(func).arguments), args, strict=False)) | kwargs
    group = tuple(dist.get_process_group_ranks(_group(given)))
    fused = is_fused(func)
    if fused:
        elements, size = _fused_size(operation, given, len(group))
    else:
        # Inputs and outputs of whatever operator: the whole tensor is the largest of them. Of an all-to-all, of which each
        # rank may get another number of rows, it is what came here.
        tensors = (result,) if operation == "all_to_all" else (*given.values(), result)
        sizes = [_size(argument) for argument in tensors]
        known = all(isinstance(number, int) for pair in sizes for number in pair)
        elements, size = max(sizes) if known else (None, None)
    reduction = given.get("reduce_op")
    return Collective(
        operation, reduction if isinstance(reduction, str) else None, group, elements, size, fused
    )


def _size(argument: Any) -> tuple[int, int]:
    """Return the elements and bytes of a tensor or a list of them."""
    tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
    return sum(x.numel() for x in tensors), sum(x.numel() * x.element_size() for x in tensors)


def _fused_size(operation: str, given: Mapping[str, Any], ranks: int) -> tuple[int | None, int | None]:
    """Elements and bytes of the tensor that a fused operator gathers, or of the product that it scatters."""
    a = given["A"]
    if operation == "all_gather":
        elements, width = a.numel() * ranks, a.element_size()
    else:
        elements = a.numel() // a.shape[-1] * given["B"].shape[-1]
        width = (given.get("out_dtype") or a.dtype).itemsize
    return (elements, elements * width) if isinstance(elements, int) else (None, None)


def _group(given: Mapping[str, Any]) -> dist.ProcessGroup:
    """The process group that an operator was given, by name or as it is."""
    group = next(value for name, value in given.items() if name in ("group_name", "process_group"))
    if isinstance(group, str):
        group = resolve_process_group(group)  # pyrefly: ignore[bad-argument-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
