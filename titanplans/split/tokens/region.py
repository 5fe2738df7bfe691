"""A region that mixes tokens, cut by tokens: its code gets a sequence that looks whole, its exit takes own tokens."""

from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.plan.styles.region import Region
from titanplans.split.state import make_state
from titanplans.split.stream import Border
from titanplans.split.tensors.rules import on_input, on_output
from titanplans.split.tokens.looks_whole import LooksWhole, look_whole


def install_region(style: Region, module: nn.Module, border: Border) -> None:
    """Let `module` work on the whole sequence, as far as its code can tell."""
    make_state(module).exchanges = True
    module.register_forward_pre_hook(partial(_enter, style, border), with_kwargs=True)
    if style.reduce_output:
        module.register_forward_hook(partial(_leave, style, border), with_kwargs=True)


def _enter(style: Region, border: Border, module: nn.Module, args: Any, kwargs: Any) -> Any:
    tokens = border.tokens
    assert tokens is not None

    def enter(x: torch.Tensor) -> LooksWhole:
        whole = look_whole(border.enter(x), tokens, border.length_of(x))
        border.within = whole.shape
        return whole

    return on_input(enter, style, style.input_name, module, args, {**kwargs, **style.arguments})


def _leave(style: Region, border: Border, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    tokens = border.tokens
    assert tokens is not None

    def leave(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, LooksWhole):
            return border.leave(x.shard)
        lead = border.within[:-1]
        return border.leave(tokens.sum(x.unflatten(0, lead) if len(lead) > 1 and x.ndim == 2 else x))

    return on_output(leave, output)
