"""Reads parameters (DTensors) as local tensors, whose gradients return as DTensors: `to_local` at a lower host cost.

The backward of `to_local` makes a spec for each gradient, which is hashed when the gradient is detached to be accumulated:
three quarters of a parameter's host time in a step. Here a spec is made once, and one autograd node may read several
parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from titanplans.split.collectives import Group
from titanplans.split.layout import Layout
from titanplans.torch_private.autograd import accumulates, grad_refcount
from titanplans.torch_private.dtensor import handed, local_tensor, spec_as, spec_of, with_spec
from titanplans.torch_private.threads import DTensorSpec


class GradientSpec:
    """Caches the spec of one parameter's gradient until the parameter's own changes, by FSDP2 or a change of dtype."""

    __slots__ = ("_made", "_of", "_placements")

    def __init__(self) -> None:
        self._of: DTensorSpec | None = None
        self._placements: tuple[Placement, ...] | None = None
        self._made: DTensorSpec | None = None

    def spec(self, param: DTensor, placements: tuple[Placement, ...]) -> DTensorSpec:
        """Return the spec of the gradient of `param` with these `placements`."""
        of = spec_of(param)
        if of is not self._of or placements is not self._placements or self._made is None:
            self._of, self._placements, self._made = of, placements, spec_as(of, *placements)
        return self._made

    def __deepcopy__(self, memo: Any) -> "GradientSpec":
        return GradientSpec()  # a mesh has process groups, and is not copied


class MixerPart(NamedTuple):
    """The part of a parameter's tensor-parallel shard that a rank of context parallelism uses in a mixer."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """First row and length of each run of rows; () for all rows."""
    divided_by: int = 1
    """Every rank of context parallelism adds it before the all-reduce, too, so it is divided by their number as well."""


class Reading(NamedTuple):
    """How a parameter is read."""

    layout: Layout
    gradient: tuple[Placement, ...]
    """Placements of the gradient on the mesh of the parameter; () where the parameter is a plain tensor."""
    uneven: bool
    rank: int
    group: Group
    gradient_spec: GradientSpec
    part: MixerPart | None = None


def read(
    param: DTensor, gradient: tuple[Placement, ...], uneven: bool, gradient_spec: GradientSpec
) -> torch.Tensor:
    """Return the local tensor of `param`, whose gradient goes back with the placements `gradient`.

    Args:
        uneven: shards differ in size, so that `to_local` can't infer the global shape from this rank's.
        gradient_spec: this parameter's.
    """
    local = local_tensor(param)
    plain = is_plain(local)
    if plain and not (param.requires_grad and torch.is_grad_enabled()):
        return local.view_as(local)
    if plain or uneven:
        return read_all([param], [gradient_spec.spec(param, gradient)])[0]
    return param.to_local(grad_placements=gradient)


def is_plain(local: torch.Tensor) -> bool:
    """Whether `local` is an eager tensor of no subclass, such as fake tensors and float8."""
    return type(local) is torch.Tensor and not torch.compiler.is_compiling()


def read_all(params: Sequence[DTensor], specs: Sequence[DTensorSpec]) -> Sequence[torch.Tensor]:
    """Return the local tensors of `params`, whose gradients will have `specs`, by one autograd node."""
    return _Read.apply(specs, *params)  # type: ignore[return-value]


class _Read(torch.autograd.Function):
    """`to_local` with the specs of the gradients.

    DTensor's own backward also assumes that all shards have this rank's size, and lets two parameters share one gradient
    where autograd passes one tensor to both (the terms of a sum).
    """

    @staticmethod
    def forward(ctx: Any, specs, *params):
        ctx.set_materialize_grads(False)
        ctx.specs = specs
        # The local tensors themselves would keep the history of their gradients.
        return tuple(local.detach() for local in map(local_tensor, params))

    @staticmethod
    def backward(ctx: Any, *grads):  # pyrefly: ignore[bad-override]
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # traced, or create_graph
            return None, *map(_as_dtensor, grads, ctx.specs)
        hand_over = handed if accumulates(ctx) else with_spec
        return None, *[_handed(grad, spec, hand_over) for grad, spec in zip(grads, ctx.specs, strict=True)]


def _handed(
    grad: torch.Tensor | None, spec: DTensorSpec, hand_over: Callable[[torch.Tensor, DTensorSpec], DTensor]
) -> DTensor | None:
    if grad is None or type(grad) is not torch.Tensor:
        return _as_dtensor(grad, spec)
    if not grad.is_contiguous():
        grad = grad.contiguous()
    elif grad_refcount(grad) > 1:
        grad = grad.clone()
    return hand_over(grad, spec)


def _as_dtensor(grad: torch.Tensor | None, spec: DTensorSpec) -> DTensor | None:
    if grad is None:
        return None
    return DTensor.from_local(
        grad.contiguous() if is_plain(grad) else grad,
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )
