"""Blocks of one kind (equal classes, shapes, settings and plan): one stands for all."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from titanplans.cli.verify.subject import Subject
from titanplans.errors import PlanError
from titanplans.plan.decoder import find_decoder
from titanplans.proof.verify import accepted_cases, cuts_of

_PLACE = ("layer_idx", "layer_id", "layer_number", "num_hidden_layers")
"""Attributes by which a block knows its number, and the number of blocks."""

_PLAIN = (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, type(None))


def kinds(model: nn.Module) -> list[Any]:
    """Return the kind of each block."""
    return [kind(block.module) for block in find_decoder(model, required=False).blocks]


def kind(block: nn.Module) -> Any:
    """Return the classes, shapes and settings of a block, without its number; equal for blocks of one kind."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, p.shape) for key, p in module._parameters.items() if p is not None),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | str | None) and key not in _PLACE
            ),
        )
        for name, module in block.named_modules()
    )


def plans(model: nn.Module, subject: Subject) -> list[Any]:
    """Return a description of each block's styles, in every case that the plan of `subject` accepts.

    Styles of one class with equal values have equal descriptions; one that asks a module for its number as the model runs
    can't be told from others.
    """
    blocks = find_decoder(model, required=False).blocks
    found: list[list[Any]] = [[] for _ in blocks]
    try:
        cases, _ = accepted_cases(
            model,
            subject.plan,
            cuts_of(subject.degrees, subject.contexts, subject.experts),
            subject.loss_parallel,
            subject.sequence_parallel,
            named=False,
        )
    except PlanError:
        return found  # the proof explains the refusal better
    for styles in cases.values():
        for block, described in zip(blocks, found, strict=True):
            prefix = f"{block.name}."
            described.append(
                {
                    key.removeprefix(prefix): description(style)
                    for key, style in styles.items()
                    if f"{key}.".startswith(prefix)
                }
            )
    return found


def description(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Return the plain values that make up `value`: equal for objects that were made in the same way."""
    if isinstance(value, _PLAIN):
        return value
    if id(value) in within:
        return within.index(id(value))
    inner = partial(description, within=(*within, id(value)))
    if isinstance(value, Mapping):
        return type(value), [(key, inner(item)) for key, item in value.items()]
    if isinstance(value, Sequence | set | frozenset):
        return type(value), [inner(item) for item in value]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, inner([*cells, value.__defaults__, value.__kwdefaults__])
    if isinstance(value, MethodType):
        return inner([value.__func__, value.__self__])
    if isinstance(value, partial):
        return inner([value.func, value.args, value.keywords])
    if isinstance(value, nn.Module | torch.Tensor) or not hasattr(value, "__dict__"):
        return id(value)  # no two blocks share it
    return type(value), inner(vars(value))


def first_that_hold_all(*properties: Sequence[Any]) -> int:
    """Return how many first blocks hold every combination of the properties; at least two, if there are two."""
    rows = list(zip(*properties, strict=True))
    every = next(
        n for n in range(len(rows) + 1) if all(row in rows[:n] for row in itertools.islice(rows, n, None))
    )
    return min(max(every, 2), len(rows))
