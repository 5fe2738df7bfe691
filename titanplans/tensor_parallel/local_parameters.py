"""Parameters that are DTensors to the optimizer and plain local tensors to the forward.

A DTensor that enters an `autograd.Function` stays one, and its `data_ptr()` is null: no Triton
kernel survives that. So a parallelised module is given a subclass of its own class in which each
sharded or replicated parameter is a property: reading `module.weight` gives the rank's local
tensor, whoever reads it (the module's forward, or a fused kernel of its parent), and its gradient
returns to the DTensor with the placement that the plan declares. What is set on it goes there too (`local_weight`).
`named_parameters`, state dicts, FSDP2 and optimizers go through `module._parameters` and see the DTensor; names do
not change.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titanplans.tensor_parallel.local_weight import as_weight
from titanplans.tensor_parallel.shards import take_shards
from titanplans.torch_private import local_tensor


class Layout(NamedTuple):
    """How one parameter lies on the TP mesh, and how its local gradient does."""

    placement: Placement
    gradient: Placement
    hidden: bool = False
    """Read as None: a style adds it elsewhere (see `local_parameter`)."""
    shared_heads: int | None = None
    """The first dimension counts this many heads, of which several ranks share one: reading gives its rows."""


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
        gradients = {name: (layout.gradient,) for name, layout in layouts.items()}
        rows = {name: _rows(module._parameters[name], layout, mesh) for name, layout in layouts.items()}
        module.__dict__["_gradient_placements"] = module.__dict__.get("_gradient_placements", {}) | gradients
        module.__dict__["_local_rows"] = module.__dict__.get("_local_rows", {}) | rows
        uneven = {name for name, layout in layouts.items() if _uneven(module._parameters[name], layout, mesh)}
        module.__dict__["_uneven"] = module.__dict__.get("_uneven", frozenset()) | uneven
        names = tuple((name, layouts[name].hidden) for name in sorted(layouts))
        module.__class__ = _with_local_parameters(type(module), names)
        module.register_load_state_dict_pre_hook(take_shards)


def local_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the local tensor of a parameter, also of a hidden one."""
    param = module._parameters[name]
    if not _on_tp_mesh(param):
        return param
    gradient, rows = module._gradient_placements[name], module._local_rows[name]  # type: ignore[index]
    local = (
        _ReadUneven.apply(param) if name in module._uneven else param.to_local(grad_placements=gradient)  # type: ignore[operator]
    )
    return as_weight(local if rows is None else local.narrow(0, *rows), param)  # type: ignore[arg-type]


class _ReadUneven(torch.autograd.Function):
    """`to_local` for a shard that is not as large as the others.

    DTensor's own backward takes this rank's share for everyone's, and gives the gradient a stride
    that belongs to no tensor of the parameter's shape.
    """

    @staticmethod
    def forward(ctx: Any, param):
        ctx.mesh, ctx.placements = param.device_mesh, param.placements
        ctx.shape, ctx.stride = param.shape, param.stride()
        local = local_tensor(param)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return DTensor.from_local(
            grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def _uneven(param: torch.Tensor | None, layout: Layout, mesh: DeviceMesh) -> bool:
    assert param is not None
    return isinstance(layout.placement, Shard) and param.shape[layout.placement.dim] % mesh.size() != 0


def _rows(param: torch.Tensor | None, layout: Layout, mesh: DeviceMesh) -> tuple[int, int] | None:
    """Return first row and number of rows of the head that this rank shares with its neighbours."""
    if layout.shared_heads is None:
        return None
    assert param is not None
    rows = param.shape[0] // layout.shared_heads
    return mesh.get_local_rank() // (mesh.size() // layout.shared_heads) * rows, rows


def _on_tp_mesh(param: torch.Tensor | None) -> bool:
    # On more than the TP mesh it is FSDP's shard, between forwards: FSDP itself reads it then.
    return isinstance(param, DTensor) and param.device_mesh.ndim == 1


def subclass(cls: type[nn.Module], members: Mapping[str, object]) -> type[nn.Module]:
    """Return a subclass of `cls` under its name, which reports and errors show."""
    return type(
        cls.__name__, (cls,), {**members, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )


@cache
def _with_local_parameters(cls: type[nn.Module], names: tuple[tuple[str, bool], ...]) -> type[nn.Module]:
    """Subclass `cls`, under the same name, with parameters as properties that give local tensors.

    One subclass per class and set of names, so that repeated blocks share one compiled artefact. Made
    at run time, so a parallelised module can't be pickled; its state dict can.
    """
    return subclass(cls, {name: property(_reader(name, hidden)) for name, hidden in names})


def _reader(name: str, hidden: bool):
    def read(module: nn.Module) -> torch.Tensor | None:
        if hidden and _on_tp_mesh(module._parameters[name]):
            return None
        return local_parameter(module, name)

    return read
