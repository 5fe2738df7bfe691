"""From parameters, DTensors, to this rank's local tensors, and from their gradients back to the parameters': DTensors.

`to_local` does the same for one. Its backward makes a spec for each gradient, which is hashed when the gradient is detached
to be accumulated: three quarters of what a parameter costs the host in a step. Here a spec is made once, and several
parameters may be read by one autograd node.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from titanplans.plan.layout import Layout
from titanplans.split.collectives import Group
from titanplans.torch_private.autograd import accumulates, grad_refcount
from titanplans.torch_private.dtensor import handed, local_tensor, spec_as, spec_of, with_spec
from titanplans.torch_private.threads import DTensorSpec


class LocalRead:
    """Remembers the spec of the gradient of one parameter, which FSDP2 and a change of its dtype replace."""

    __slots__ = ("_made", "_of", "_placements")

    def __init__(self) -> None:
        self._of: DTensorSpec | None = None
        self._placements: tuple[Placement, ...] | None = None
        self._made: DTensorSpec | None = None

    def spec(self, param: DTensor, placements: tuple[Placement, ...]) -> DTensorSpec:
        """Return the spec of the gradient of `param`, which lies as `placements` say."""
        of = spec_of(param)
        if of is not self._of or placements is not self._placements or self._made is None:
            self._of, self._placements, self._made = of, placements, spec_as(of, *placements)
        return self._made

    def __deepcopy__(self, memo: Any) -> "LocalRead":
        return LocalRead()  # a mesh has process groups, and is not copied


class MixerPart(NamedTuple):
    """What a rank of context parallelism uses, in a mixer, of what its rank of tensor parallelism has of a parameter."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """The first row and the number of each run; () for all rows."""
    divided_by: int = 1
    """It is added to so many times as many parts of a sum."""


class Reading(NamedTuple):
    """The data that reading a parameter takes, apart from the parameter."""

    layout: Layout
    gradient: tuple[Placement, ...]
    """How its gradient lies on the mesh of the parameter; () where that is a plain tensor."""
    uneven: bool
    rank: int
    group: Group
    local_read: LocalRead
    part: MixerPart | None = None


def read(
    param: DTensor, gradient: tuple[Placement, ...], uneven: bool, local_read: LocalRead
) -> torch.Tensor:
    """Return the local tensor of `param`, whose gradient goes back with the placements `gradient`.

    Args:
        uneven: the shards are not equally large, so that `to_local` can't tell the whole shape by this rank's.
        local_read: the one of this parameter.
    """
    local = local_tensor(param)
    plain = is_plain(local)
    if plain and not needs_gradient(param):
        return local.view_as(local)
    if plain or uneven:
        return read_all([param], [local_read.spec(param, gradient)])[0]
    return param.to_local(grad_placements=gradient)


def is_plain(local: torch.Tensor) -> bool:
    """Whether `local` is an eager tensor and no other subclass: fake tensors, float8."""
    return type(local) is torch.Tensor and not torch.compiler.is_compiling()


def needs_gradient(param: torch.Tensor) -> bool:
    """Whether a tensor read of `param` now is to be differentiated."""
    return param.requires_grad and torch.is_grad_enabled()


def read_all(params: Sequence[DTensor], specs: Sequence[DTensorSpec]) -> Sequence[torch.Tensor]:
    """Return the local tensors of `params`, whose gradients will have `specs`, by one autograd node."""
    return _Read.apply(specs, *params)  # type: ignore[return-value]


class _Read(torch.autograd.Function):
    """`to_local` with the specs of the gradients.

    The backward of DTensor's own also takes the size of this rank's shard for everyone's, and lets two parameters share one
    gradient, where autograd has one tensor for both (of the parts of a sum).
    """

    @staticmethod
    def forward(ctx: Any, specs, *params):
        ctx.set_materialize_grads(False)
        ctx.specs = specs
        # The local tensors themselves would keep the history of their gradients.
        return tuple(local.detach() for local in map(local_tensor, params))

    @staticmethod
    def backward(ctx: Any, *grads):  # pyrefly: ignore[bad-override]
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # as one is to be differentiated again
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
