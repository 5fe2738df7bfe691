"""The float8 product of a Linear that is split over ranks, with the scales of the whole Linear.

torchao scales a tensor, or each row, by its absolute maximum. Where a tensor is sharded, the maximum is reduced over the
ranks, so each element becomes the same float8 number as in the whole model. Only the order of sums differs.

How the tensors of the product of x [tokens, inputs] and w [inputs, outputs] lie on the ranks:

                    split by outputs       split by inputs     replicated in a region
    x               whole                  part of inputs      whole
    w               part of outputs        part of inputs      whole
    gradient        part of outputs        whole               a summand of it

The recipes, the casts and the products are torchao's (`torchao.float8`); on one rank the result is bitwise that of its
`Float8Linear`.
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
    """How the product of one Linear lies on the ranks, in values that a compiled graph can hold."""

    group: Group
    rank: int
    operands: Operands


def split_linear(module: nn.Module, style: Style, ranks: HeadRanks) -> None:
    """Let `module`, a Float8Linear that `style` cuts by weights, use the scales of the whole one; in place.

    With the recipe tensorwise, `SplitState.weight_scale` may be set to the scale of the whole weight; otherwise each
    product seeks it.
    """
    if (operands := style.operands(ranks.degree)) is not None:
        make_state(module).product = Split(ranks.group, ranks.rank, operands)
        specialise(module, _with_split_product(type(module)))


def comes_from_product(x: torch.Tensor) -> bool:
    """Whether the backward of `x` is a split product, which alone takes a gradient in float8.

    Not behind a bias, whose gradient is a sum, nor behind an index. While a graph is traced it is taken to be so.
    """
    return torch.compiler.is_compiling() or isinstance(getattr(x.grad_fn, "split", None), Split)


@cache
def _with_split_product(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled():  # on CUDA, as torchao's
            input = input.to(torch.get_autocast_dtype("cuda"))
        state = self._split
        output = _SplitProduct.apply(
            input, self.weight.t(), state.weight_scale, self.linear_mm_config, self.config, state.product
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)

    return subclass(cls, {"forward": forward}, "float8_product")


@torch.compiler.allow_in_graph
class _SplitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, w, w_scale, mm_config, config: Float8LinearConfig, split: Split):
        cast = _Cast(mm_config, config, split.group)
        shape, rows = x.shape, config.cast_config_input.scaling_granularity is ScalingGranularity.AXISWISE
        flat = x.reshape(-1, shape[-1])
        # With one scale it is cast unflattened: async tensor parallelism looks for that around the product.
        x8, x_scale = cast(
            flat if rows else x,
            config.cast_config_input,
            GemmInputRole.INPUT,
            -1,
            1 if split.operands.inputs else None,
        )
        held = 0 if split.operands.inputs else 1 if split.operands.outputs else None
        w8, w_scale = cast(w, config.cast_config_weight, GemmInputRole.WEIGHT, 0, held, w_scale)
        ctx.save_for_backward(flat, w, x_scale, w_scale)
        ctx.cast, ctx.config, ctx.split, ctx.held, ctx.shape = cast, config, split, held, shape
        return torch.mm(x8.reshape(-1, shape[-1]), w8).reshape(*shape[:-1], w.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        x, w, x_scale, w_scale = ctx.saved_tensors
        cast, c, split = ctx.cast, ctx.config, ctx.split
        grad = grad.reshape(-1, grad.shape[-1])
        if split.operands.replicas > 1:
            grad = _summed(grad, split)
        g_held = 1 if split.operands.outputs else None
        grad_x = grad_w = g_scale = None
        if ctx.needs_input_grad[0]:
            g8, g_scale = cast(grad, c.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1, g_held)
            w8, _ = cast(w, c.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT, -1, ctx.held, w_scale)
            grad_x = _share(torch.mm(g8, w8.t()), split).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            x_held = 1 if split.operands.inputs else None
            role = GemmInputRole.GRAD_OUTPUT
            g8, _ = cast(grad, c.cast_config_grad_output_for_grad_weight, role, 0, g_held, g_scale)
            role = GemmInputRole.INPUT
            x8, _ = cast(x, c.cast_config_input_for_grad_weight, role, 0, x_held, x_scale)
            grad_w = _share(torch.mm(g8.t(), x8), split).t()
        return grad_x, grad_w, None, None, None, None


class _Cast:
    """Casts of one product's tensors to float8."""

    def __init__(self, mm_config: Any, config: Float8LinearConfig, group: Group):
        self.mm_config, self.config, self.group = mm_config, config, group

    def __call__(
        self,
        tensor: torch.Tensor,
        cast: CastConfig,
        role: GemmInputRole,
        over: int,
        held: int | None,
        known: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a tensor in float8, or as it is where the recipe leaves it so, and its scale, if it has just one.

        Args:
            tensor: cast already, or not; 2-D if its rows have scales.
            cast: what the recipe says of it.
            role: in the product.
            over: the dimension whose numbers share a scale where rows or columns have their own.
            held: the dimension that is sharded over the ranks.
            known: the scale of the whole tensor, if it has one scale.
        """
        if tensor_already_casted_to_fp8(tensor) or cast.scaling_type is ScalingType.DISABLED:
            return tensor, None
        dtype = cast.target_dtype
        assert dtype is not None  # a config fills it in
        rows = cast.scaling_granularity is ScalingGranularity.AXISWISE
        scale = None if rows else known
        if scale is None:
            scale = tensor_to_scale(
                tensor,
                dtype,
                scaling_granularity=cast.scaling_granularity,
                axiswise_dim=over if rows else None,
                round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
            )
            if held is not None and (not rows or over % 2 == held):
                # The largest number has the smallest scale.
                scale = all_reduce(scale, self.group, "min")
        whole = hp_tensor_and_scale_to_float8(
            tensor, scale, dtype, self.mm_config, role, over if rows else None
        )
        return whole, None if rows else scale


def _summed(grad: torch.Tensor, split: Split) -> torch.Tensor:
    """Sum the gradients of the ranks that share outputs, before they are cast: float8 numbers don't add up."""
    ranks = split.group[1]
    if split.operands.replicas == ranks:
        return all_reduce(grad, split.group)
    every = all_gather(grad, 0, len(grad) * ranks, split.group)
    shared = every.view(ranks // split.operands.replicas, split.operands.replicas, *grad.shape).sum(1)
    return shared.narrow(0, split.rank // split.operands.replicas, 1).squeeze(0)


def _share(result: torch.Tensor, split: Split) -> torch.Tensor:
    """Divide what all ranks that share outputs have computed alike, since it is summed over them later."""
    return result if split.operands.replicas == 1 else result / split.operands.replicas
