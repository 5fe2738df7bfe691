"""Styles of a norm over a width that the ranks share, such as one norm over all heads together; and one fused with more."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.errors import PlanError
from titanplans.tensor_parallel.collectives import (
    Group,
    gather,
    group_of,
    sum_in_region,
)
from titanplans.tensor_parallel.layout import Layout, Rows
from titanplans.tensor_parallel.local_code import Place
from titanplans.tensor_parallel.local_parameters import hidden_bias
from titanplans.tensor_parallel.sent import Call, Sent, gathered_inside, summed_inside
from titanplans.tensor_parallel.styles import Style

_EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
"""Names under which norms keep what they add to the mean square."""

Statistic = Callable[..., torch.Tensor]
"""What a norm takes the mean square of, given the arguments of its forward."""


class SplitNorm(Style):
    """Split the width of a root-mean-square norm; one number a token, its mean square, is averaged over the ranks.

    The module divides its part by the root mean square of that part. What it returns is then multiplied by the ratio of
    that root to the whole width's, so that its own code and kernels stand, with a weight or 1 + weight, with a gate behind
    the norm. A bias is added afterwards.

    Args:
        rows: the rows of the weight that a rank reads, where ranks share heads; None for even shards.
        statistic: what the mean square is taken of, where that is not the first argument: a gate before the norm.
        groups: into which the width is cut, each with a mean square of its own; neighbouring ranks share one where there
            are too few of them.
    """

    inside = True

    def __init__(self, *, rows: Rows | None = None, statistic: Statistic | None = None, groups: int = 1):
        self.rows, self.statistic, self.groups = rows, statistic, groups

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        return {"groups of its width": (self.groups, True)}

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        if self.rows is not None:
            return Layout(Replicate(), Partial(), hidden=name == "bias", rows=self.rows)
        return Layout(Shard(0), Shard(0), hidden=name == "bias")

    def refusal(self, module: nn.Module) -> str | None:
        if not any(hasattr(module, name) for name in _EPSILONS):
            return (
                f"it has no {' or '.join(_EPSILONS)}, so what it adds to the mean square is not known: give it this "
                "attribute, or take gathered_in_region()"
            )
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            return "it subtracts a mean, too: take gathered_in_region()"
        return None

    def sends(self, module: nn.Module, call: Call) -> tuple[Sent, ...]:
        sharing = max(1, call.degree // self.groups)
        if sharing == 1:
            return ()
        return (
            summed_inside(call.tokens)
            if sharing == call.degree
            else gathered_inside(call.tokens * call.degree),
        )

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.RMSNorm):
            (width,) = module.normalized_shape
            rows = width // mesh.size() if self.rows is None else sum(run.size for run in self.rows.runs)
            module.normalized_shape = (rows,)
        group, sharing = group_of(mesh), max(1, mesh.size() // self.groups)
        first = mesh.get_local_rank() // sharing * sharing
        module.register_forward_hook(partial(self._correct, group, first, sharing), with_kwargs=True)

    def _correct(
        self, group: Group, first: int, sharing: int, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        if sharing > 1:
            x = args[0] if self.statistic is None else self.statistic(*args, **kwargs)
            epsilon = next(getattr(module, name) for name in _EPSILONS if hasattr(module, name))
            if epsilon is None:  # torch's RMSNorm: that of the input's dtype
                epsilon = torch.finfo(x.dtype).eps
            output = (output * root_ratio(x, epsilon, group, first, sharing)).to(output.dtype)
        bias = hidden_bias(module)
        return output if bias is None else output + bias


def root_ratio(
    x: torch.Tensor, epsilon: float, group: Group, first: int = 0, sharing: int | None = None
) -> torch.Tensor:
    """Return the ratio of the root mean square of this rank's `x` [..., width] to that of more ranks', [..., 1].

    They are all ranks of `group`, or `sharing` ones from the `first`.
    """
    own = _MeanSquare.apply(x, epsilon)
    if sharing is None or sharing == group[1]:
        return _RootRatio.apply(own, sum_in_region(own, group), group[1])
    of_ranks = gather(own, own.ndim - 1, group[1], group).narrow(-1, first, sharing)
    return _RootRatio.apply(own, of_ranks.sum(-1, keepdim=True), sharing)


class _MeanSquare(torch.autograd.Function):
    """The mean square of `x` [..., width] plus `epsilon`, [..., 1], in float32 or wider; fewer kernels than autograd's."""

    @staticmethod
    def forward(ctx: Any, x, epsilon):
        ctx.save_for_backward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide.square().mean(-1, keepdim=True).add_(epsilon)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        return (x * (grad * (2 / x.shape[-1]))).to(x.dtype), None


class _RootRatio(torch.autograd.Function):
    """The root of `own` over the mean of `total`, a sum over so many ranks; fewer kernels than autograd's."""

    @staticmethod
    def forward(ctx: Any, own, total, ranks):
        ratio = (own / total).mul_(ranks).sqrt_()
        ctx.save_for_backward(own, total, ratio)
        return ratio

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        own, total, ratio = ctx.saved_tensors
        half = grad * ratio * 0.5
        return half / own, -(half / total), None


def over_all_ranks(function: Callable[..., Any], place: Place) -> Callable[..., torch.Tensor]:
    """Return `function`, a root-mean-square norm fused with a product of its output, for a width that the ranks share.

    It takes `x` [..., width] and `eps` and may gate behind the norm, as FLA's `rms_norm_linear` and
    `rms_norm_swish_gate_linear`. As `SplitNorm` does, the output is multiplied by the ratio of the roots.

    The function raises:
        PlanError: an argument of it that such a ratio can't be applied behind: a bias, a residual.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def local(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        for name in ("norm_bias", "linear_bias", "residual", "prenorm"):
            if (value := given.get(name)) is not None and value is not False:
                raise PlanError(
                    f"{function.__name__}: over_all_ranks takes no {name}: its part of the output is not in proportion to "
                    "the norm's; split the norm and the product apart, by split_norm() or gathered_in_region()"
                )
        output = function(*args, **kwargs)
        return (output * root_ratio(given["x"], given["eps"], place.group)).to(output.dtype)

    return local


class GatheredInRegion(Style):
    """Run a module on the whole width, on every rank, and go on with this rank's part of its output.

    Costs a gather of activations, where `SplitNorm` sums one number a token, and is right for any norm. All positional
    arguments are split alike.

    Args:
        dim: the dimension of the arguments and of the output that is split: the last, or that of heads.
    """

    inside = True

    def __init__(self, *, dim: int = -1):
        self.dim = dim

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), Partial())

    def sends(self, module: nn.Module, call: Call) -> tuple[Sent, ...]:
        return tuple(gathered_inside(shape.numel() * call.degree) for shape in call.given)

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        group = group_of(mesh)
        module.register_forward_pre_hook(partial(self._gather, group))
        module.register_forward_hook(partial(self._take, mesh.get_local_rank()))

    def _gather(self, group: Group, module: nn.Module, args: Any) -> Any:
        def whole(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return gather(x, self.dim % x.ndim, x.shape[self.dim] * group[1], group)

        module.__dict__["_tp_width"] = args[0].shape[self.dim]
        return tuple(map(whole, args))

    def _take(self, rank: int, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        width = module.__dict__["_tp_width"]
        return output.narrow(self.dim, rank * width, width).contiguous()
