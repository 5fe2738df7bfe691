"""Blocks of one kind (equal classes, shapes, settings and plan): one stands for all."""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from titanplans.cli.verify.subject import Subject
from titanplans.errors import PlanError
from titanplans.plan.decoder import find_decoder
from titanplans.proof.verify import accepted_cases, cuts_of

_PLACE = ("layer_idx", "layer_id", "layer_number", "num_hidden_layers")
"""Attributes by which a block knows its number, and the number of blocks."""


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
    """Return the class and the values of each block's styles, in every case that the plan of `subject` accepts.

    A style that asks a module for its number as the model runs can't be told from others.
    """
    blocks = find_decoder(model, required=False).blocks
    found: list[list[Any]] = [[] for _ in blocks]
    try:
        cases, _ = accepted_cases(
            model,
            subject.plan,
            cuts_of(model, subject.degrees),
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
                    key.removeprefix(prefix): (type(style), vars(style))
                    for key, style in styles.items()
                    if f"{key}.".startswith(prefix)
                }
            )
    return found


def first_that_hold_all(*properties: Sequence[Any]) -> int:
    """Return how many first blocks hold every combination of the properties; at least two, if there are two."""
    rows = list(zip(*properties, strict=True))
    every = next(
        n for n in range(len(rows) + 1) if all(row in rows[:n] for row in itertools.islice(rows, n, None))
    )
    return min(max(every, 2), len(rows))
