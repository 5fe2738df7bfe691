"""Operators that communicate: the collective, its ranks, and the bytes that a rank receives. Start at `describe`.

The operators are of torch's functional collectives (`_c10d_functional`), process groups (`c10d`), DTensor, and symmetric
memory, whose fused operators overlap the collective with a matrix product. `recorder` describes operators as they run, and
`graphs` describes the operators of compiled graphs.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from titanplans.torch_private.dispatch import named_arguments, schema, tree_leaves
from titanplans.torch_private.distributed import resolve_process_group

Phase = Literal["forward", "backward", "recomputed", "update", "log"]
"""The phases of a step. recomputed: a forward repeated in the backward. update: after a backward. log: after
`ModuleTracker.log_begins`."""

NAMESPACES = ("_c10d_functional", "c10d_functional", "c10d", "_dtensor", "symm_mem")
"""Namespaces of operators that communicate."""

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
"""Maps a substring of an operator's name (without underscores) to the collective. The first match counts."""

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
    """The reduction of a functional collective: sum, avg, min, ...; None: there is none, or it is not known."""

    group: tuple[int, ...]
    """The global ranks of its process group."""

    elements: int | None
    """Number of elements of the full tensor that is gathered, reduced or scattered; None: a graph has symbolic sizes."""

    bytes: int | None
    """Bytes of the full tensor."""

    fused: bool
    """Whether the operator overlaps the collective with a matrix product (async tensor parallelism)."""

    module: str | None = None
    """Fully qualified name of the innermost module whose forward or backward issues it. For an FSDP module's collective, the
    first module of its parameter group. "": the model itself. None: outside of the model, or unknown."""

    phase: Phase = "forward"

    is_fsdp: bool = False
    """Whether an FSDP module issues the collective."""

    overlapped: bool = False
    """Whether matrix products run between the collective and its wait, in a compiled graph."""

    @property
    def ranks(self) -> int:
        """Number of ranks in its process group."""
        return len(self.group)

    @property
    def received(self) -> int | None:
        """Bytes that a rank receives on a ring; None if `bytes` is None."""
        return None if self.bytes is None else received(self.operation, self.bytes, self.ranks)


def received(operation: str, size: int, ranks: int) -> int:
    """Return the bytes that each rank receives on a ring of `ranks`, for a full tensor of `size` bytes.

    This is (n-1)/n of the size, or 2(n-1)/n in an all-reduce (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce
    algorithms"), or the full size for an operation to or from a single rank.
    """
    passes = _RING_PASSES.get(operation)
    return size if passes is None else passes * size * (ranks - 1) // ranks


def operation_of(func: Any) -> str | None:
    """Return the collective of an operator, such as all_gather, reduce_scatter, all_reduce; None if it sends nothing.

    Raises:
        NotImplementedError: a communication operator that is not in the table.
    """
    namespace, _, name = schema(func).name.partition("::")
    if namespace not in NAMESPACES or name in _NO_DATA:
        return None
    plain = name.replace("_", "")
    operation = next((operation for substring, operation in _OPERATIONS.items() if substring in plain), None)
    if operation is None and namespace != "symm_mem":  # symm_mem also has barriers, handles and products
        raise NotImplementedError(f"{func} is not in the table of operators, so its bytes can't be counted")
    return operation


def is_fused(func: Any) -> bool:
    """Whether the operator fuses a collective with a matrix product."""
    return schema(func).name.startswith("symm_mem::fused_")


def describe(func: Any, args: Any, kwargs: Any, result: Any) -> Collective | None:
    """Return the collective that an operator issues with these arguments, real or fake tensors; None if it sends nothing.

    Raises:
        NotImplementedError: as in `operation_of`.
    """
    operation = operation_of(func)
    if operation is None:
        return None
    arguments = named_arguments(func, args, kwargs)
    group = tuple(dist.get_process_group_ranks(_group(arguments)))
    fused = is_fused(func)
    if fused:
        elements, size = _fused_size(operation, arguments, len(group))
    else:
        # For every operator the full tensor is the largest of all inputs and outputs. In an all-to-all, ranks may receive
        # different numbers of rows; the tensor that this rank receives counts.
        tensors = (result,) if operation == "all_to_all" else (*arguments.values(), result)
        sizes = [_size(argument) for argument in tensors]
        has_sizes = all(isinstance(size, int) for pair in sizes for size in pair)  # not symbolic
        elements, size = max(sizes) if has_sizes else (None, None)
    reduction = arguments.get("reduce_op")
    return Collective(
        operation, reduction if isinstance(reduction, str) else None, group, elements, size, fused
    )


def _size(argument: Any) -> tuple[int, int]:
    """Return the numbers of elements and of bytes of a tensor or of a list of tensors."""
    tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
    return sum(x.numel() for x in tensors), sum(x.numel() * x.element_size() for x in tensors)


def _fused_size(operation: str, arguments: Mapping[str, Any], ranks: int) -> tuple[int | None, int | None]:
    """Return elements and bytes of the full input that a fused operator gathers, or of the full product that it scatters."""
    a = arguments["A"]
    if operation == "all_gather":
        elements, itemsize = a.numel() * ranks, a.element_size()
    else:
        elements = a.numel() // a.shape[-1] * arguments["B"].shape[-1]
        itemsize = (arguments.get("out_dtype") or a.dtype).itemsize
    return (elements, elements * itemsize) if isinstance(elements, int) else (None, None)


def _group(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    group = next(value for name, value in arguments.items() if name in ("group_name", "process_group"))
    if isinstance(group, str):
        group = resolve_process_group(group)  # pyrefly: ignore[bad-argument-type]
    # As an operator's argument, a group may be a boxed script object.
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
