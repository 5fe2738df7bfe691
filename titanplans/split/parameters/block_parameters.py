"""The parameters of a block, read together as its forward begins: by one autograd node, where each would have its own.

That halves what reading them costs the host. Each is read once a forward, whoever asks for it, and the gradients of a block
go back together, at the end of its backward. Read one by one, when they are asked for, are parameters outside of blocks, in
a compiled block, or where no gradient is needed; one whose reading is a collective; and what a unit of FSDP2 inside of the
block has not gathered yet.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.split.parameters.local_parameters import (
    Reading,
    finish,
    is_exchanged,
    is_gathered,
    readings_of,
)
from titanplans.split.parameters.local_read import read_all
from titanplans.split.state import make_state
from titanplans.torch_private.dtensor import local_tensor

Holders = list[tuple[nn.Module, tuple[str, ...]]]
"""Modules inside of a block, and the names of their parameters that are read together."""


def read_together(blocks: Iterable[nn.Module]) -> None:
    """Let the parameters of each of `blocks`, which are split, be read together."""
    for block in blocks:
        holders: Holders = []
        for module in block.modules():
            names = [
                name
                for name, reading in readings_of(module).items()
                if reading.gradient and not is_exchanged(reading.layout)
            ]
            if names:
                holders.append((module, tuple(names)))
        if holders:
            block.register_forward_pre_hook(partial(_begin, holders))
            block.register_forward_hook(partial(_end, holders), always_call=True)


def _begin(holders: Holders, block: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    found: list[tuple[dict[str, torch.Tensor], str, Reading]] = []
    params, specs = [], []
    for module, names in holders:
        state = make_state(module)
        readings, known = state.readings, state.read_by_block
        known.clear()  # an interrupt may have left something
        parameters: Any = module._parameters
        for name in names:
            param = parameters[name]
            reading = readings[name]
            if (
                is_gathered(param, reading)
                and param.requires_grad
                and type(local_tensor(param)) is torch.Tensor
            ):
                found.append((known, name, reading))
                params.append(param)
                specs.append(reading.gradient_spec.spec(param, reading.gradient))
    if params:
        for (known, name, reading), local, param in zip(found, read_all(params, specs), params, strict=True):
            known[name] = finish(local, param, reading)


def _end(holders: Holders, block: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        for module, _ in holders:
            make_state(module).read_by_block.clear()
