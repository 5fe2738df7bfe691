"""Replicated modules at the borders of the stream: on it, whole off it, and the one at which it ends."""

from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.plan.styles.replicated import EndOfStream, ReplicatedOnStream, Whole
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.split.stream import Border
from titanplans.split.tensors.rules import Rule, on_input, on_output


def _install_on_stream(style: ReplicatedOnStream, module: nn.Module, border: Border) -> None:
    if border.stream.is_cut:
        module.register_forward_pre_hook(partial(_check, border))


def _check(border: Border, module: nn.Module, args: Any) -> None:
    # On a whole sequence each rank's gradient is the whole one, and would be summed.
    if torch.is_grad_enabled():
        border.stream.check_runs()


def _install_whole(style: Whole, module: nn.Module, border: Border) -> None:
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


def _install_end(style: EndOfStream, module: nn.Module, border: Border) -> None:
    module.register_forward_pre_hook(partial(_end, border))


def _expect_end(style: EndOfStream, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    return () if call.dim is None else (ExpectedCollective(("all_gather",), (), call.elements),)


def _end(border: Border, module: nn.Module, args: Any) -> Any:
    if border.stream.dim is None:
        return None
    whole = border.end(args[0])
    border.stream.stop()
    return (whole, *args[1:])


ON_STREAM, WHOLE = Rule(_install_on_stream), Rule(_install_whole, _expect_whole)
END_OF_STREAM = Rule(_install_end, _expect_end)
