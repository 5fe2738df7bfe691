"""Which collectives a training step issues: of which block, over which ranks, in which phase, how large.

    with record_collectives(model, mesh) as record:
        ...                     # one step
    record.collectives

A passive look at what reaches the dispatcher. What a compiled block issues is seen, too, whatever the backend:
inductor's code calls the operators as eager code does, and that is what is counted. Where the step is at that moment
is `step_places`', how many graphs a block became `compile_record`'s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanplans.observe.operators import NAMESPACES, group_of, operation_of, received, size_of
from titanplans.observe.step_places import Phase, Places, follow

_AXES = ("tp", "fsdp", "dp_replicate", "cp", "pp", "dp", "dp_cp")
"""Names of meshes; of two over the same ranks the first names them."""


class Collective(NamedTuple):
    """One collective, as this rank issues it."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, ..."""

    group: str
    """The mesh whose ranks take part: tp, fsdp, ..., or world; "part of fsdp" where no mesh has just these."""

    ranks: int
    """How many take part: at least two, as over one rank nothing is sent."""

    place: str | None
    """Fully qualified name: of the block, or of the part beside the blocks; None outside of all of them."""

    phase: Phase

    received: int
    """Bytes that this rank receives on a ring (`titanplans.observe.operators.received`)."""

    fused: bool
    """Issued by an operator that multiplies matrices meanwhile (async tensor parallelism)."""


class Record:
    """What a step communicated, in order.

    Attributes:
        collectives: those that are known.
        unknown: operators that look like collectives and that nobody here knows: they are not among these.
        places: where the step is.
    """

    def __init__(self, places: Places):
        self.collectives: list[Collective] = []
        self.unknown: list[str] = []
        self.places = places


@contextmanager
def record_collectives(model: nn.Module, mesh: Any) -> Iterator[Record]:
    """Record the collectives of what runs inside: forwards and backwards of `model`, and the update.

    Args:
        model: parallelised. Not to be entered twice at a time.
        mesh: a `Mesh`, or torchtitan's ParallelDims.
    """
    with follow(model) as places:
        record = Record(places)
        with _Mode(record, _group_names(mesh)):
            yield record


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, record: Record, groups: dict[tuple[int, ...], str]):
        super().__init__()
        self.record, self.groups = record, groups

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as if this were not here, and see what the compiled code calls."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # nothing is computed: DTensor asks so for shapes
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # subclasses first: they issue collectives on what they hold
        result = func(*args, **kwargs)
        if getattr(func, "namespace", None) in (*NAMESPACES, "symm_mem"):
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        try:
            operation = operation_of(func)
        except NotImplementedError:
            if func.namespace != "symm_mem":  # which has operators that send nothing besides
                self.record.unknown.append(str(func))
            return
        if operation is None:
            return
        group = group_of(func, args, kwargs)
        if (ranks := group.size()) == 1:
            return
        fused = "::fused_" in func._schema.name
        if (
            fused
        ):  # beside the collective's tensor there are the products': one shard and the ranks say how large
            shard = args[0] if operation == "all_gather" else result
            size = size_of(shard)[1] * ranks
        else:  # inputs and outputs of whatever operator: the whole tensor is the largest of them
            size = max(size_of(argument)[1] for argument in (*args, *kwargs.values(), result))
        place, phase = self.record.places.now()
        sent = received(operation, size, ranks)
        self.record.collectives.append(
            Collective(operation, self._name(group), ranks, place, phase, sent, fused)
        )

    def _name(self, group: dist.ProcessGroup) -> str:
        members = dist.get_process_group_ranks(group)
        if (name := self.groups.get(tuple(members))) is not None:
            return name
        return f"part of {next(name for ranks, name in self.groups.items() if set(members) <= set(ranks))}"


def meshes(mesh: Any) -> dict[str, Any]:
    """Return the 1-D meshes of more than one rank by name; of several over the same ranks, the first of `_AXES`.

    Args:
        mesh: a `Mesh`, or torchtitan's ParallelDims.
    """
    found: dict[tuple[int, ...], tuple[str, Any]] = {}
    for axis in _AXES:
        # torchtitan's names of two of them.
        one = mesh.get_optional_mesh({"dp": "batch", "dp_cp": "loss"}.get(axis, axis))
        if one is not None and one.size() > 1:
            found.setdefault(tuple(dist.get_process_group_ranks(one.get_group())), (axis, one))
    return dict(found.values())


def _group_names(mesh: Any) -> dict[tuple[int, ...], str]:
    """Names by ranks, single axes before their combinations, and the world last."""
    names = {tuple(dist.get_process_group_ranks(one.get_group())): axis for axis, one in meshes(mesh).items()}
    world = tuple(range(dist.get_world_size()))
    return names if world in names else names | {world: "world"}
