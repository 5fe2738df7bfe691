"""Styles of a norm over a width that the ranks share, such as one norm over all heads together."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.tensor_parallel.collectives import Group, gather, sum_gradients, sum_ranks
from titanplans.tensor_parallel.layout import Layout, Rows
from titanplans.tensor_parallel.local_parameters import hidden_bias
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
    """

    inside = True

    def __init__(self, *, rows: Rows | None = None, statistic: Statistic | None = None):
        self.rows, self.statistic = rows, statistic

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

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.RMSNorm):
            (width,) = module.normalized_shape
            rows = width // mesh.size() if self.rows is None else sum(run.size for run in self.rows.runs)
            module.normalized_shape = (rows,)
        group = (mesh.get_group().group_name, mesh.size())
        module.register_forward_hook(partial(self._correct, group), with_kwargs=True)

    def _correct(self, group: Group, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        x = args[0] if self.statistic is None else self.statistic(*args, **kwargs)
        epsilon = next(getattr(module, name) for name in _EPSILONS if hasattr(module, name))
        if epsilon is None:  # torch's RMSNorm: that of the input's dtype
            epsilon = torch.finfo(x.dtype).eps
        output = (output * root_ratio(x, epsilon, group)).to(output.dtype)
        bias = hidden_bias(module)
        return output if bias is None else output + bias


def root_ratio(x: torch.Tensor, epsilon: float, group: Group) -> torch.Tensor:
    """Return the ratio of the root mean square of this rank's `x` [..., width] to that of all ranks', [..., 1]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    own = wide.square().mean(-1, keepdim=True)
    # Each rank goes on with its share of the work: its gradients of the mean are shares, too.
    whole = sum_gradients(sum_ranks(own, group), group) / group[1]
    return ((own + epsilon) / (whole + epsilon)).sqrt()


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

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        group = (mesh.get_group().group_name, mesh.size())
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
