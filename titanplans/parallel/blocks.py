"""Lists of blocks by what they read: the decoder's, and those of vision towers."""

from typing import Literal

from torch import nn

from titanplans.errors import ParallelError
from titanplans.tensor_parallel.structure import find_decoder, find_layers, join

Scope = Literal["all", "language", "vision"]
SCOPES: tuple[Scope, ...] = ("all", "language", "vision")


def block_lists(model: nn.Module, scope: Scope) -> list[tuple[str, ...]]:
    """Return the fully qualified names of the blocks in `scope`, list by list.

    Raises:
        ParallelError: the scope is vision, and `model` has no vision tower with blocks.
        PlanError: the scope is another, and `model` has no decoder.
    """
    towers = [] if scope == "language" else _towers(model)
    if scope == "vision":
        if not towers:
            raise ParallelError(
                f'activation checkpointing\'s scope = "vision": {type(model).__name__} has no vision tower with '
                'blocks; set it to "all" or "language"'
            )
        return towers
    return [find_decoder(model).layers, *towers]


def _towers(model: nn.Module) -> list[tuple[str, ...]]:
    towers: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{tower}.") for tower in towers)
        is_tower = not inside and any(word in name.rpartition(".")[2] for word in ("vision", "visual"))
        if is_tower and (blocks := find_layers(module)):
            towers[name] = tuple(join(name, block) for block in blocks)
    return list(towers.values())
