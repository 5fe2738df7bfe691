"""Parameters that are DTensors to the optimizer and plain local tensors to the forward.

A DTensor that enters an `autograd.Function` stays one, and its `data_ptr()` is null: no Triton
kernel survives that. So a parallelised module is given a subclass of its own class in which each
sharded or replicated parameter is a property: reading `module.weight` gives the rank's local
tensor, whoever reads it (the module's forward, or a fused kernel of its parent), and its gradient
returns to the DTensor with the placement that the plan declares. An attribute set on it is set there too (`local_weight`).
`named_parameters`, state dicts, FSDP2 and optimizers go through `module._parameters` and see the DTensor; names do
not change.
"""

from collections.abc import Callable, Mapping, Set
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titanplans.errors import ParallelError
from titanplans.split.collectives import Group
from titanplans.split.layout import Layout, rows_read
from titanplans.split.parameters.local_read import GradientSpec, MixerPart, Reading, read
from titanplans.split.parameters.local_weight import as_weight
from titanplans.split.parameters.selection import of_ranges, selected
from titanplans.split.state import SplitState, make_state, specialise, state_of, subclass
from titanplans.text import class_name

Read = Callable[[nn.Module, str], torch.Tensor | None]
Kind = Callable[[type[nn.Module], tuple[str, ...]], type[nn.Module]]
"""Subclasses a module's class so that the parameters of these names are read in some way."""
ParameterMemo = dict[nn.Parameter, nn.Parameter]
"""What each parameter of a model has been distributed as: it keeps tied weights tied."""


class ParameterMesh(NamedTuple):
    """The mesh of a module's parameters, and which of its dimensions a `Layout` speaks of."""

    mesh: DeviceMesh | None
    """Of the DTensors: its last dimension is that of the layouts; None: parameters stay plain tensors, which data
    parallelism sums the gradients of."""
    copies: int = 0
    """So many dimensions before it have a copy of the parameters each, whose gradients are parts."""
    cut: bool = True
    """The layouts have a dimension; otherwise all of them are those of copies."""

    def placements(self, layout: Layout) -> tuple[Placement, ...]:
        """Return how a parameter with this layout lies on the mesh."""
        return (Replicate(),) * self.copies + ((layout.placement,) if self.cut else ())

    def gradient(self, layout: Layout) -> tuple[Placement, ...]:
        """Return the placements of its gradient."""
        return (Partial(),) * self.copies + ((layout.gradient,) if self.cut else ())


def localize(
    module: nn.Module,
    over: ParameterMesh,
    layouts: Mapping[str, Layout],
    memo: ParameterMemo,
    group: Group,
    rank: int,
    parts: Mapping[str, MixerPart] | None = None,
) -> None:
    """Distribute the parameters of `module` named in `layouts`; let attribute reads give local tensors.

    Real values are taken from the mesh's first rank, so that replicas agree whatever the seeds
    were; parameters on meta move nothing.

    Args:
        module: its own parameters are laid out, not its children's.
        over: which mesh.
        layouts: by name, on `group`, in which this rank is `rank`.
        memo: of the model.
        parts: what this rank reads, by name; without one all that it holds.
    """
    mesh, parts, buffers = over.mesh, parts or {}, layouts.keys() & module._buffers.keys()
    if mesh is None:  # what is read as it is needs no reader
        layouts = {name: layout for name, layout in layouts.items() if name in parts or layout.deferred}
    layouts = dict(layouts)
    for name, layout in layouts.items():
        if name in buffers:
            rows = rows_read(layout, getattr(module, name).shape, group[1])
            layouts[name] = layout._replace(placement=Replicate(), rows=rows)
        elif mesh is not None:
            param = module._parameters[name]
            assert param is not None, name
            if (known := memo.get(param)) is None:
                tensor = distribute_tensor(param.detach(), mesh, over.placements(layout))
                known = nn.Parameter(tensor, requires_grad=param.requires_grad)
                known.__dict__.update(param.__dict__)  # marks such as _no_weight_decay
                memo[param] = known
            module._parameters[name] = known
    if layouts:
        for name, layout in layouts.items():
            placement, shape = layout.placement, getattr(module, name).shape
            uneven = over.cut and isinstance(placement, Shard) and shape[placement.dim] % group[1] != 0
            gradient = () if mesh is None or name in buffers else over.gradient(layout)
            make_state(module).readings[name] = Reading(
                layout, gradient, uneven, rank, group, GradientSpec(), parts.get(name)
            )
        for names, kind in _kinds(layouts, buffers).items():
            specialise(module, kind(type(module), names))


def readings_of(module: nn.Module) -> dict[str, Reading]:
    """Return how the parameters of `module` are read, by name; {} if it is not split."""
    return {} if (state := state_of(module)) is None else state.readings


def local_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the local tensor of a parameter, also of a deferred one: what this rank's part of the work needs.

    Raises:
        ParallelError: a plain tensor was put in the parameter's place.
    """
    state = state_of(module)
    param = module._parameters[name]
    if state is None or (reading := state.readings.get(name)) is None:
        return param
    if not torch.compiler.is_compiling() and name in state.read_by_block:
        return _part(state.read_by_block[name], param, reading, state)
    if not is_gathered(param, reading):
        if param is not None and not isinstance(param, DTensor):
            raise ParallelError(
                f"the {name} of a {class_name(module)} was split, and is now a plain tensor, whose gradient would not be "
                "summed over the ranks: copy values into the parameter, or set a DTensor on the mesh of tensor parallelism"
            )
        return param
    assert param is not None
    if not reading.gradient:
        return _part(param, param, reading, state)
    sharded = cast("DTensor", param)
    local = read(sharded, reading.gradient, reading.uneven, reading.gradient_spec)
    return _part(finish(local, sharded, reading), param, reading, state)


def _part(
    local: torch.Tensor, param: torch.Tensor | None, reading: Reading, state: SplitState
) -> torch.Tensor:
    """Return the part of `local` that a mixer uses on a rank of context parallelism; all, in products with own tokens."""
    if (part := reading.part) is None or state.reads_all:
        return local
    if part.divided_by > 1:
        local = local / part.divided_by
    if part.ranges:
        local = of_ranges(local, part.dim, part.ranges)
    return local if param is None else as_weight(local, param)


def finish(local: torch.Tensor, param: DTensor, reading: Reading) -> torch.Tensor:
    """Return what a rank uses of `local`, its tensor of `param`."""
    layout = reading.layout
    if layout.divided_by > 1:
        local = local / layout.divided_by
    if layout.rows is not None:
        local = selected(local, layout, reading.rank, reading.group)
    return as_weight(local, param)


def add_deferred_bias(module: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Return the output of `module` with the bias that its own forward does not see, if there is one."""
    reading = readings_of(module).get("bias")
    bias = local_parameter(module, "bias") if reading is not None and reading.layout.deferred else None
    return output if bias is None else output + bias


def is_gathered(param: torch.Tensor | None, reading: Reading) -> bool:
    """Whether `param` is what a forward reads."""
    # On more than its own mesh it is FSDP's shard, between forwards: FSDP itself reads it then.
    if not reading.gradient:
        return param is not None and not isinstance(param, DTensor)
    return isinstance(param, DTensor) and param.device_mesh.ndim == len(reading.gradient)


def _kinds(layouts: Mapping[str, Layout], buffers: Set[str]) -> dict[tuple[str, ...], Kind]:
    """Return which subclass gives which parameters, in a set order: repeated blocks share one compiled artefact."""
    exchanged = {name for name, layout in layouts.items() if is_exchanged(layout)}
    deferred = {name for name, layout in layouts.items() if layout.deferred}
    kinds: tuple[tuple[Set[str], Kind], ...] = (
        (layouts.keys() - exchanged - deferred - buffers, partial(_reading, local_parameter)),
        (deferred, partial(_reading, _none)),
        (exchanged, read_inside),
        (buffers, partial(_reading, _part_of_buffer)),
    )
    return {tuple(sorted(names)): kind for names, kind in kinds if names}


def is_exchanged(layout: Layout) -> bool:
    """Whether reading the parameter is a collective."""
    return layout.rows is not None and isinstance(layout.placement, Shard)


@cache
def _reading(read: Read, cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Subclass `cls` with properties that give what `read` returns for the module and the name of a parameter."""

    def reader(name: str) -> property:
        return property(lambda self: read(self, name))

    return subclass(cls, {name: reader(name) for name in names})


def _none(module: Any, name: str) -> torch.Tensor | None:
    """A deferred parameter, which the module's own forward does not see."""
    param = module._parameters[name]
    return None if is_gathered(param, module._split.readings[name]) else param


def _part_of_buffer(module: Any, name: str) -> torch.Tensor:
    """This rank's part of a whole buffer."""
    whole, reading = module._buffers[name], module._split.readings[name]
    if reading.layout.rows is not None:
        whole = selected(whole, reading.layout, reading.rank, reading.group)
    return _part(whole, None, reading, module._split)


@cache
def read_inside(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Subclass `cls`, whose own forward alone reads this rank's part of a parameter; others read the DTensor.

    For a vocabulary's rows: a loss of one's own on a share of them would be wrong in silence, and torch refuses products of
    plain tensors with DTensors. And for exchanged parameters: one rank that reads alone would wait for the others. A forward
    that reads it for each expert gets the same tensor each time.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._split.read_inside = {}
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            self._split.read_inside = None

    def reader(name: str) -> Any:
        def read(self: Any) -> torch.Tensor | None:
            known = self._split.read_inside
            if known is None:
                return self._parameters[name]
            if name not in known:
                known[name] = local_parameter(self, name)
            return known[name]

        return property(read)

    return subclass(cls, {"forward": forward, **{name: reader(name) for name in names}})
