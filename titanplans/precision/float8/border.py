"""A region's border that tensors cross in float8: a tensor is cast once, with the scale of the full tensor, and gathered.

The border is for the recipe tensorwise, in which a tensor has one scale. torchao's float8 parallel styles do the same for
DTensors.

    border   in float8                                      in high precision, because it is summed over the ranks
    enter    activations, used by all projections inside    their gradients
    leave    gradients of the output                        the output
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import tensor_to_scale

from titanplans.errors import PlanError
from titanplans.precision.float8.linear import comes_from_product
from titanplans.split.border import Border
from titanplans.split.collectives import Group, all_gather, all_reduce, reduce_scatter
from titanplans.split.converted import float8_linears
from titanplans.torch_private.torchao import float8_data


class Float8Border(Border):
    """A border whose activations, gradients, or both are gathered in float8.

    Args:
        of: the border in high precision.
        module: the region's module, or the head; it contains converted modules.
        enter: gather activations in float8; `module` is called with a `Float8TrainingTensor`.
        leave: gather the output's gradients in float8; the backward of `module` gets a `Float8TrainingTensor`.
    """

    def __init__(self, of: Border, module: nn.Module, *, enter: bool, leave: bool):
        vars(self).update(vars(of))
        linear = next(iter(float8_linears(module).values()))
        self.casts_input, self.casts_gradient = enter, leave
        self.mm_config = linear.linear_mm_config
        self.dtype = linear.config.cast_config_input.target_dtype
        self.gradient_dtype = linear.config.cast_config_grad_output.target_dtype
        # gloo does not support float8, so it gathers bytes. NCCL gathers float8, since async tensor parallelism fuses only
        # a gather of float8.
        assert of.mesh is not None
        self.as_bytes = dist.get_backend(of.mesh.get_group()) == "gloo"

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if not self.casts_input:
            return super().enter(x)
        if (dim := self.stream.dim) is not None:
            self.stream.check_runs()
        return self._cast(x, dim)

    def enter_full(self, x: torch.Tensor) -> torch.Tensor:
        return self._cast(x, None) if self.casts_input else super().enter_full(x)

    def _cast(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        if torch.is_autocast_enabled():  # on CUDA, as in torchao's modules
            x = x.to(torch.get_autocast_dtype("cuda"))
        return _Enter.apply(x, dim, self.group, self.as_bytes, self.mm_config, self.dtype)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if not self.casts_gradient or self.stream.dim is None or not comes_from_product(x):
            return super().leave(x)
        return _Leave.apply(
            x, self.stream.dim, self.group, self.as_bytes, self.mm_config, self.gradient_dtype
        )


# As in torchao: Dynamo does not trace into this function, only AOTAutograd does.
@torch.compiler.allow_in_graph
class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, group, as_bytes, mm_config, dtype):
        ctx.dim, ctx.group = dim, group
        return _cast_and_gather(x, dim, group, as_bytes, mm_config, dtype, GemmInputRole.INPUT)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        _refuse_double_backward()
        summed = all_reduce(grad, ctx.group) if ctx.dim is None else reduce_scatter(grad, ctx.dim, ctx.group)
        return summed, None, None, None, None, None


@torch.compiler.allow_in_graph
class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, group, as_bytes, mm_config, dtype):
        ctx.dim, ctx.group = dim, group
        ctx.as_bytes, ctx.mm_config, ctx.dtype = as_bytes, mm_config, dtype
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        _refuse_double_backward()
        gathered = _cast_and_gather(
            grad, ctx.dim, ctx.group, ctx.as_bytes, ctx.mm_config, ctx.dtype, GemmInputRole.GRAD_OUTPUT
        )
        return gathered, None, None, None, None, None


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise PlanError(
            "the gradient of a split float8 model can't be differentiated again (create_graph = True): train without float8"
        )


def _cast_and_gather(
    x: torch.Tensor,
    dim: int | None,
    group: Group,
    as_bytes: bool,
    mm_config: LinearMMConfig,
    dtype: torch.dtype,
    role: GemmInputRole,
) -> Float8TrainingTensor:
    """Cast `x` and all-gather it along `dim`. If `dim` is None, `x` is replicated, and only cast."""
    scale = tensor_to_scale(x, dtype)
    if dim is not None:
        scale = all_reduce(scale, group, "min")  # the smallest scale belongs to the largest maximum
    data = float8_data(hp_tensor_and_scale_to_float8(x, scale, dtype, mm_config, role))
    if dim is not None:
        data = all_gather(
            data.view(torch.uint8) if as_bytes else data, dim, x.shape[dim] * group[1], group
        ).view(dtype)
    return Float8TrainingTensor(data, scale, x.dtype, mm_config, role)
