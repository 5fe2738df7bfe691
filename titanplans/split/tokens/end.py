"""The module at whose entry the stream ends, where tokens are cut: it works on own ones, and its output looks whole."""

from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.split.stream import Border
from titanplans.split.tensors.rules import on_output
from titanplans.split.tokens.looks_whole import look_whole


def install_end(module: nn.Module, border: Border) -> None:
    """Let `module`, a final norm, end the stream: the model's code behind it sees the whole sequence's shape."""
    module.register_forward_pre_hook(partial(_gather, border))
    module.register_forward_hook(partial(_look, border))


def _gather(border: Border, module: nn.Module, args: Any) -> Any:
    own = border.shared_tokens(args[0], border.stream.length)
    border.stream.stop()
    return (own, *args[1:])


def _look(border: Border, module: nn.Module, args: Any, output: Any) -> Any:
    tokens = border.tokens
    assert tokens is not None

    def look(x: torch.Tensor) -> torch.Tensor:
        return look_whole(x, tokens, border.stream.length, "outside")

    return on_output(look, output)
