"""What stands at a border of the stream, cut by weights: regions, modules that run whole or on the stream, and its end.

The whole sequence enters a region, and the ranks' parts of its output are summed at its exit.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.plan.styles.region import Region
from titanplans.plan.styles.replicated import EndOfStream, ReplicatedOnStream, Whole
from titanplans.split.costs import Call, ExpectedCollective, entered, left
from titanplans.split.stream import Border
from titanplans.split.tensors.rules import Rule, Site, on_input, on_output


def _install_region(style: Region, module: nn.Module, site: Site) -> None:
    border = site.border
    module.register_forward_pre_hook(partial(_enter, style, border), with_kwargs=True)
    if style.reduce_output:
        module.register_forward_hook(partial(_leave, style, border), with_kwargs=True)


def _expect_region(style: Region, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
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


def _install_on_stream(style: ReplicatedOnStream, module: nn.Module, site: Site) -> None:
    border = site.border
    if border.stream.is_cut:
        module.register_forward_pre_hook(partial(_check, border))


def _check(border: Border, module: nn.Module, args: Any) -> None:
    # On a whole sequence each rank's gradient is the whole one, and would be summed.
    if torch.is_grad_enabled():
        border.stream.check_runs()


def _install_whole(style: Whole, module: nn.Module, site: Site) -> None:
    border = site.border
    module.register_forward_pre_hook(partial(_gather, style, border), with_kwargs=True)
    module.register_forward_hook(partial(_shard, border))


def _expect_whole(style: Whole, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    if call.dim is None:
        return ()
    return ExpectedCollective(("all_gather",), (), call.elements), ExpectedCollective(
        (), ("all_gather",), call.elements
    )


def _gather(style: Whole, border: Border, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return on_input(border.whole, style, style.input_name, module, args, kwargs)


def _shard(border: Border, module: nn.Module, args: Any, output: Any) -> Any:
    return on_output(border.shard, output)


def _install_end(style: EndOfStream, module: nn.Module, site: Site) -> None:
    border = site.border
    module.register_forward_pre_hook(partial(_end, border))


def _expect_end(style: EndOfStream, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    return () if call.dim is None else (ExpectedCollective(("all_gather",), (), call.elements),)


def _end(border: Border, module: nn.Module, args: Any) -> Any:
    if border.stream.dim is None:
        return None
    whole = border.end(args[0])
    border.stream.stop()
    return (whole, *args[1:])


REGION = Rule(_install_region, _expect_region)
ON_STREAM, WHOLE = Rule(_install_on_stream), Rule(_install_whole, _expect_whole)
END_OF_STREAM = Rule(_install_end, _expect_end)
