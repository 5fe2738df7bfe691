"""From a parameter, a DTensor, to this rank's local tensor, and from that one's gradient back to the parameter's: a DTensor.

`to_local` does the same. Its backward makes a spec for each gradient, which then is hashed to detach the gradient as it is
accumulated: three quarters of what a parameter costs in a step. Here the spec is made once.
"""

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from titanplans.torch_private import DTensorSpec, local_tensor, spec_as, spec_of, users, with_spec


class Handover:
    """Remembers the spec of the gradient of one parameter, which FSDP2 and a change of its dtype replace."""

    __slots__ = ("_made", "_of", "_placement")

    def __init__(self) -> None:
        self._of: DTensorSpec | None = None
        self._placement: Placement | None = None
        self._made: DTensorSpec | None = None

    def spec(self, param: DTensor, placement: Placement) -> DTensorSpec:
        """Return the spec of the gradient of `param`, which lies as `placement` says."""
        of = spec_of(param)
        if of is not self._of or placement is not self._placement or self._made is None:
            self._of, self._placement, self._made = of, placement, spec_as(of, placement)
        return self._made

    def __deepcopy__(self, memo: Any) -> "Handover":
        return Handover()  # a mesh has process groups, and is not copied


def read(param: DTensor, gradient: Placement, uneven: bool, handover: Handover) -> torch.Tensor:
    """Return the local tensor of `param`, whose gradient goes back with the placement `gradient`.

    Args:
        param: on a 1-D mesh.
        uneven: the shards are not equally large, so that DTensor can't tell the whole shape by this rank's.
        handover: the one of this parameter.
    """
    local = local_tensor(param)
    plain = type(local) is torch.Tensor and local.is_contiguous() and not torch.compiler.is_compiling()
    if not (uneven or (plain and param.is_contiguous())):
        return param.to_local(grad_placements=(gradient,))
    return cast("torch.Tensor", _Read.apply(param, handover.spec(param, gradient)))


class _Read(torch.autograd.Function):
    """`to_local` with the spec of the gradient.

    The backward of DTensor's own also takes the size of this rank's shard for everyone's, and lets two parameters share one
    gradient, where autograd has one tensor for both (of the parts of a sum).
    """

    @staticmethod
    def forward(ctx: Any, param, spec):
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        local = local_tensor(param)
        return local.view_as(local)  # the local tensor itself would keep the gradient's history

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        if grad is None:
            return None, None
        spec = ctx.spec
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(grad) is not torch.Tensor:
            whole = DTensor.from_local(
                grad, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
            )
            return whole, None
        if not grad.is_contiguous():
            grad = grad.contiguous()
        elif users(grad) > 1:
            grad = grad.clone()
        return with_spec(grad, spec), None
