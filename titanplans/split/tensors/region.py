"""A region, cut by weights: the whole sequence enters, and the ranks' parts of its output are summed at its exit."""

from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.plan.styles.region import Region
from titanplans.split.costs import Call, ExpectedCollective, entered, left
from titanplans.split.stream import Border
from titanplans.split.tensors.rules import Rule, on_input, on_output


def _install(style: Region, module: nn.Module, border: Border) -> None:
    module.register_forward_pre_hook(partial(_enter, style, border), with_kwargs=True)
    if style.reduce_output:
        module.register_forward_hook(partial(_leave, style, border), with_kwargs=True)


def _expect(style: Region, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    return (entered(call),) if style.shared else (entered(call), left(call))


def _enter(style: Region, border: Border, module: nn.Module, args: Any, kwargs: Any) -> Any:
    enter = border.enter_plainly if _masks_tokens(args, kwargs) else border.enter
    return on_input(enter, style, style.input_name, module, args, {**kwargs, **style.arguments})


def _leave(style: Region, border: Border, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    shape = (args[0] if args else kwargs[style.input_name]).shape[:-1]
    # What the module does behind its last product is not known of a graph that is being traced.
    cross = border.leave_plainly if torch.compiler.is_compiling() else border.leave

    def leave(x: torch.Tensor) -> torch.Tensor:
        # A mixture of experts may return its tokens in a row, where a sequence can't be found.
        return cross(x.unflatten(0, shape) if len(shape) > 1 and x.ndim == 2 else x)

    return on_output(leave, output)


def _masks_tokens(args: Any, kwargs: Any) -> bool:
    """Whether a mask [batch, sequence] is among a module's arguments.

    The module may take the tokens that count out of the sequence, and give its projections these alone, whose scale is
    another one than that of all.
    """
    named = (value for name, value in kwargs.items() if "mask" in name)
    return any(isinstance(value, torch.Tensor) and value.ndim == 2 for value in (*args[1:], *named))


REGION = Rule(_install, _expect)
