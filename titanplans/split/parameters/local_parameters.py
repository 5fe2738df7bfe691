"""Parameters that are DTensors to the optimizer and plain local tensors to the forward.

A DTensor that enters an `autograd.Function` stays one, and its `data_ptr()` is null: no Triton
kernel survives that. So a parallelised module is given a subclass of its own class in which each
sharded or replicated parameter is a property: reading `module.weight` gives the rank's local
tensor, whoever reads it (the module's forward, or a fused kernel of its parent), and its gradient
returns to the DTensor with the placement that the plan declares. An attribute set on it is set there too (`local_weight`).
`named_parameters`, state dicts, FSDP2 and optimizers go through `module._parameters` and see the DTensor; names do
not change.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titanplans.errors import ParallelError
from titanplans.plan.layout import Layout
from titanplans.split.collectives import group_of
from titanplans.split.parameters.local_read import LocalRead, Reading, read
from titanplans.split.parameters.local_weight import as_weight
from titanplans.split.parameters.selection import selected
from titanplans.split.parameters.shards import take_shards
from titanplans.split.state import make_state, specialise, state_of, subclass
from titanplans.text import class_name


class ParameterMemo(dict[int, nn.Parameter]):
    """Parameters already distributed, by the `id` of the original: what keeps tied weights tied.

    Holds the originals too, so that no `id` is reused while a plan is being applied.
    """

    def __init__(self) -> None:
        super().__init__()
        self._originals: list[nn.Parameter] = []

    def remember(self, original: nn.Parameter, distributed: nn.Parameter) -> None:
        """Record that `original` has become `distributed`."""
        self._originals.append(original)
        self[id(original)] = distributed


def localize(
    module: nn.Module,
    mesh: DeviceMesh,
    layouts: Mapping[str, Layout],
    memo: ParameterMemo,
) -> None:
    """Distribute the parameters of `module` named in `layouts`; let attribute reads give local tensors.

    Real values are taken from the mesh's first rank, so that replicas agree whatever the seeds
    were; parameters on meta move nothing.
    """
    for name, layout in layouts.items():
        param = module._parameters[name]
        assert param is not None, name
        known = memo.get(id(param))
        if known is None:
            tensor = distribute_tensor(param.detach(), mesh, [layout.placement])
            known = nn.Parameter(tensor, requires_grad=param.requires_grad)
            known.__dict__.update(param.__dict__)  # marks such as _no_weight_decay
            memo.remember(param, known)
        module._parameters[name] = known
    if layouts:
        group = group_of(mesh)
        readings = {
            name: Reading(
                layout,
                _uneven(module._parameters[name], layout, mesh),
                mesh.get_local_rank(),
                group,
                LocalRead(),
            )
            for name, layout in layouts.items()
        }
        make_state(module).readings |= readings
        for names, kind in _kinds(layouts).items():
            specialise(module, kind(type(module), names))
        module.register_load_state_dict_pre_hook(take_shards)


def readings_of(module: nn.Module) -> dict[str, Reading]:
    """Return how the parameters of `module` are read, by name; of one that is not split, none."""
    return {} if (state := state_of(module)) is None else state.readings


def local_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the local tensor of a parameter, also of a hidden one: what this rank's part of the work needs.

    Raises:
        ParallelError: a plain tensor was put in the parameter's place.
    """
    state = state_of(module)
    if state is not None and not torch.compiler.is_compiling() and name in state.read_by_block:
        return state.read_by_block[name]
    param = module._parameters[name]
    if state is None or not on_tp_mesh(param):
        if (
            param is not None
            and not isinstance(param, DTensor)
            and state is not None
            and name in state.readings
        ):
            raise ParallelError(
                f"the {name} of a {class_name(module)} was split, and is now a plain tensor, whose gradient would not be "
                "summed over the ranks: copy values into the parameter, or set a DTensor on the mesh of tensor parallelism"
            )
        return param
    reading = state.readings[name]
    sharded = cast("DTensor", param)
    return finish(
        read(sharded, reading.layout.gradient, reading.uneven, reading.local_read), sharded, reading
    )


def finish(local: torch.Tensor, param: DTensor, reading: Reading) -> torch.Tensor:
    """Return what a rank uses of `local`, its tensor of `param`."""
    layout = reading.layout
    if layout.addends > 1:
        local = local / layout.addends
    if layout.rows is not None:
        local = selected(local, layout, reading.rank, reading.group)
    return as_weight(local, param)


def hidden_bias(module: nn.Module) -> torch.Tensor | None:
    """Return the bias of `module` that its own forward does not see; None if there is none, or it does."""
    reading = readings_of(module).get("bias")
    return local_parameter(module, "bias") if reading is not None and reading.layout.hidden else None


def _uneven(param: torch.Tensor | None, layout: Layout, mesh: DeviceMesh) -> bool:
    assert param is not None
    return isinstance(layout.placement, Shard) and param.shape[layout.placement.dim] % mesh.size() != 0


def on_tp_mesh(param: torch.Tensor | None) -> bool:
    """Whether `param` is split, and gathered."""
    # On more than the TP mesh it is FSDP's shard, between forwards: FSDP itself reads it then.
    return isinstance(param, DTensor) and param.device_mesh.ndim == 1


def _kinds(layouts: Mapping[str, Layout]) -> dict[tuple[str, ...], Callable[..., type[nn.Module]]]:
    """Return which subclass gives which parameters, in a set order: repeated blocks share one compiled artefact."""
    exchanged = {name for name, layout in layouts.items() if is_exchanged(layout)}
    hidden = {name for name, layout in layouts.items() if layout.hidden}
    kinds = (
        (layouts.keys() - exchanged - hidden, _read_anywhere),
        (hidden, _not_read),
        (exchanged, read_inside),
    )
    return {tuple(sorted(names)): kind for names, kind in kinds if names}


def is_exchanged(layout: Layout) -> bool:
    """Whether reading the parameter is a collective."""
    return layout.rows is not None and isinstance(layout.placement, Shard)


@cache
def _read_anywhere(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Subclass `cls` with parameters as properties that give local tensors."""

    def reader(name: str) -> property:
        return property(lambda self: local_parameter(self, name))

    return subclass(cls, {name: reader(name) for name in names})


@cache
def _not_read(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Subclass `cls` with parameters that are read as None."""

    def reader(name: str) -> property:
        return property(lambda self: None if on_tp_mesh(self._parameters[name]) else self._parameters[name])

    return subclass(cls, {name: reader(name) for name in names})


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
