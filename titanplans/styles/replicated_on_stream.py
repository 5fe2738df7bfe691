"""`replicated_on_stream()`: a token-wise module on the residual stream, such as a block's norm."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from titanplans.split.border import Border
from titanplans.split.converted import is_float8
from titanplans.split.layout import Layout
from titanplans.styles.base import ParameterStyle, Site, SplitOver


class ReplicatedOnStream(ParameterStyle):
    """Replicate a token-wise module's parameters on the residual stream [..., sequence, hidden].

    forward   y = norm(local tokens of x): nothing is sent
    backward  dw is partial if the sequence is sharded, replicated if not
    """

    is_on_stream = True

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return Layout(Replicate(), over.stream.gradient)

    def refusal(self, module: nn.Module, over: SplitOver) -> str | None:
        if is_float8(module) and over.stream.dim is not None:
            return (
                "in float8 each rank would scale its shard of the sequence by the shard's own maximum: exclude the module "
                "from float8 (filter it), or set sequence_parallel = False"
            )
        return None

    def by_weights(self, module: nn.Module, site: Site) -> None:
        if site.border.stream.shards_sequence:
            module.register_forward_pre_hook(partial(_check, site.border))


def _check(border: Border, module: nn.Module, args: Any) -> None:
    # On a full sequence each rank already has the full gradient, and a sum over the ranks would be too large.
    if torch.is_grad_enabled():
        border.stream.check_runs()
