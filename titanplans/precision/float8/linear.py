"""The float8 product of a Linear that is split over tensor-parallel ranks, with the scales of the unsplit Linear.

torchao scales a tensor, or each row, by its absolute maximum. If a tensor is sharded, the maximum is reduced over the ranks,
so each element is cast to the same float8 value as in the unsplit model. Only the order of summation differs.

Placements in the product of x [tokens, inputs] and w [inputs, outputs]:

                            split by outputs          split by inputs          replicated in a region
    x                       replicated                sharded over inputs      replicated
    w                       sharded over outputs      sharded over inputs      replicated
    gradient of output      sharded over outputs      replicated               partial

Recipes, casts and products are torchao's. On one rank the result is bitwise equal to the result of torchao's `Float8Linear`.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import tensor_to_scale

from titanplans.split.collectives import Group, all_gather, all_reduce
from titanplans.split.local_code import HeadRanks
from titanplans.split.state import make_state, specialise, subclass
from titanplans.styles.base import Operands, Style


@dataclass(frozen=True)
class Split:
    """How the product of one Linear is split over the ranks. It names no DeviceMesh, so a compiled graph can hold it."""

    group: Group
    rank: int
    operands: Operands


def split_linear(module: nn.Module, style: Style, ranks: HeadRanks) -> None:
    """Make `module`, a Float8Linear that is split by `style`, use the scales of the unsplit Linear, in place.

    With the recipe tensorwise, `SplitState.weight_scale` may hold the scale of the full weight. If `weight_scale` is None,
    each product computes the scale.
    """
    if (operands := style.operands(ranks.degree)) is not None:
        make_state(module).product = Split(ranks.group, ranks.rank, operands)
        specialise(module, _with_split_product(type(module)))


def comes_from_product(x: torch.Tensor) -> bool:
    """Whether `x` is the direct result of a split product, the only function whose backward takes a float8 gradient.

    False after a bias was added, since the gradient of the bias is a sum over tokens, and after indexing. Assumed True
    while torch.compile traces.
    """
    return torch.compiler.is_compiling() or isinstance(getattr(x.grad_fn, "split", None), Split)


@cache
def _with_split_product(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled():  # on CUDA, as in torchao's Float8Linear
            input = input.to(torch.get_autocast_dtype("cuda"))
        state = self._split
        output = _SplitProduct.apply(
            input, self.weight.t(), state.weight_scale, self.linear_mm_config, self.config, state.product
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)

    return subclass(cls, {"forward": forward}, "float8_product")


# As in torchao: Dynamo does not trace into this function, only AOTAutograd does.
@torch.compiler.allow_in_graph
class _SplitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, w, w_scale, mm_config, config: Float8LinearConfig, split: Split):
        cast = _Cast(mm_config, config, split.group)
        shape = x.shape
        is_rowwise = config.cast_config_input.scaling_granularity is ScalingGranularity.AXISWISE
        flat = x.reshape(-1, shape[-1])
        # A tensor with one scale is cast before it is flattened: async tensor parallelism fuses only this order of
        # operators.
        x8, x_scale = cast(
            flat if is_rowwise else x,
            config.cast_config_input,
            GemmInputRole.INPUT,
            -1,
            1 if split.operands.inputs else None,
        )
        w_dim = 0 if split.operands.inputs else 1 if split.operands.outputs else None
        w8, w_scale = cast(w, config.cast_config_weight, GemmInputRole.WEIGHT, 0, w_dim, w_scale)
        ctx.save_for_backward(flat, w, x_scale, w_scale)
        ctx.cast, ctx.config, ctx.split, ctx.w_dim, ctx.shape = cast, config, split, w_dim, shape
        return torch.mm(x8.reshape(-1, shape[-1]), w8).reshape(*shape[:-1], w.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        x, w, x_scale, w_scale = ctx.saved_tensors
        cast, c, split = ctx.cast, ctx.config, ctx.split
        grad = grad.reshape(-1, grad.shape[-1])
        if split.operands.replicas > 1:
            grad = _sum_partial(grad, split)
        g_dim = 1 if split.operands.outputs else None
        grad_x = grad_w = g_scale = None
        if ctx.needs_input_grad[0]:
            g8, g_scale = cast(grad, c.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1, g_dim)
            w8, _ = cast(w, c.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT, -1, ctx.w_dim, w_scale)
            grad_x = _divide_replicated(torch.mm(g8, w8.t()), split).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            x_dim = 1 if split.operands.inputs else None
            role = GemmInputRole.GRAD_OUTPUT
            g8, _ = cast(grad, c.cast_config_grad_output_for_grad_weight, role, 0, g_dim, g_scale)
            role = GemmInputRole.INPUT
            x8, _ = cast(x, c.cast_config_input_for_grad_weight, role, 0, x_dim, x_scale)
            grad_w = _divide_replicated(torch.mm(g8.t(), x8), split).t()
        return grad_x, grad_w, None, None, None, None


class _Cast:
    """Casts the operands of one product to float8."""

    def __init__(self, mm_config: Any, config: Float8LinearConfig, group: Group):
        self.mm_config, self.config, self.group = mm_config, config, group

    def __call__(
        self,
        tensor: torch.Tensor,
        cast: CastConfig,
        role: GemmInputRole,
        reduced_dim: int,
        sharded_dim: int | None,
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `tensor` in float8, and its scale if the recipe has one scale per tensor, else None.

        A tensor that is cast already, or that the recipe keeps in high precision, is returned unchanged.

        Args:
            tensor: 2-D if the recipe has one scale per row or column.
            cast: the recipe's config for this operand.
            role: the operand's role in the product.
            reduced_dim: with a scale per row or column, the dimension whose elements share a scale.
            sharded_dim: the dimension that is sharded over the ranks, if any.
            scale: the scale of the full tensor, if it was computed before; ignored with scales per row or column.
        """
        if tensor_already_casted_to_fp8(tensor) or cast.scaling_type is ScalingType.DISABLED:
            return tensor, None
        dtype = cast.target_dtype
        assert dtype is not None  # a config fills it in
        is_axiswise = cast.scaling_granularity is ScalingGranularity.AXISWISE
        if is_axiswise or scale is None:
            scale = tensor_to_scale(
                tensor,
                dtype,
                scaling_granularity=cast.scaling_granularity,
                axiswise_dim=reduced_dim if is_axiswise else None,
                round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
            )
            if sharded_dim is not None and (not is_axiswise or reduced_dim % 2 == sharded_dim):
                # The smallest scale belongs to the largest maximum.
                scale = all_reduce(scale, self.group, "min")
        tensor8 = hp_tensor_and_scale_to_float8(
            tensor, scale, dtype, self.mm_config, role, reduced_dim if is_axiswise else None
        )
        return tensor8, None if is_axiswise else scale


def _sum_partial(grad: torch.Tensor, split: Split) -> torch.Tensor:
    """Sum the partial gradients of the ranks that compute the same outputs. This precedes the cast, since a sum of cast
    values differs from the cast sum."""
    ranks = split.group[1]
    if split.operands.replicas == ranks:
        return all_reduce(grad, split.group)
    gathered = all_gather(grad, 0, len(grad) * ranks, split.group)
    sums = gathered.view(ranks // split.operands.replicas, split.operands.replicas, *grad.shape).sum(1)
    return sums.narrow(0, split.rank // split.operands.replicas, 1).squeeze(0)


def _divide_replicated(result: torch.Tensor, split: Split) -> torch.Tensor:
    """Divide a gradient by the number of ranks that have computed the same gradient, because ranks are summed later."""
    return result if split.operands.replicas == 1 else result / split.operands.replicas
