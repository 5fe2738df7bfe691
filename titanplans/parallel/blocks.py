"""Lists of blocks by what they read: the decoder's, and those of vision towers."""

from typing import Literal

from torch import nn

from titanplans.errors import OptionError
from titanplans.tensor_parallel.decoder import find_decoder

Scope = Literal["all", "language", "vision"]
SCOPES: tuple[Scope, ...] = ("all", "language", "vision")


def block_lists(model: nn.Module, scope: Scope) -> list[tuple[str, ...]]:
    """Return the fully qualified names of the blocks in `scope`, list by list.

    Raises:
        ParallelError: the scope is vision, and `model` has no vision tower with blocks.
        PlanError: the scope is another, and `model` has no decoder.
    """
    decoder = find_decoder(model, required=scope != "vision")
    towers = [] if scope == "language" else list(decoder.towers)
    if scope == "vision":
        if not towers:
            raise OptionError(
                "activation_checkpoint.scope",
                scope,
                f'{type(model).__name__} has no vision tower with blocks: set it to "all" or "language"',
            )
        return towers
    return [decoder.names, *towers]
