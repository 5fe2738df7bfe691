"""Explicit prefetch: each FSDP unit gathers the next units, in the order of execution, ahead of their use."""

from collections.abc import Sequence

from torch import nn

from titanplans.config import FSDP2Config
from titanplans.parallel.fsdp.units import FSDPUnit, fsdp_module, managed


def check_depth(config: FSDP2Config, option: str, units: int, ranks: int) -> None:
    """Raise OptionError if the prefetch depth of `option` has no effect for this number of units or of ranks."""
    depth = getattr(config, option)
    if depth >= units:
        raise config.error(option, f"the model has {units} units, so a unit can prefetch at most {units - 1}")
    if depth and ranks == 1:
        raise config.error(option, "parameters are sharded over 1 rank, so nothing is gathered: set it to 0")


def chain_units(model: nn.Module, units: Sequence[FSDPUnit], forward: int, backward: int) -> None:
    """Let each unit prefetch the next `forward` units in the forward, and the next `backward` units in the backward.

    0 leaves torch's default. `units` are the result of `find_units`. The root, the embedding, the blocks, and the final norm
    with the head are one chain of units. Each vision tower is a separate chain, since a batch may have no images.
    """
    if not forward and not backward:
        return
    root, *others = units
    towers: dict[str, list[FSDPUnit]] = {}
    for unit in others:
        tower = unit.names[0].rpartition(".")[0] if unit.role == "tower" else ""  # "": the decoder
        towers.setdefault(tower, []).append(unit)
    decoder = towers.pop("")
    for stack in (decoder, *towers.values()):
        # The root runs first, forward and backward.
        first = [root] if stack is decoder else []
        # The backward does not reach units before the first trainable parameter.
        trained = [any(p.requires_grad for p in _params(model, unit, units)) for unit in stack]
        back = list(reversed(stack[trained.index(True) :] if any(trained) else []))
        for depth, chain, is_forward in (
            (forward, [*first, *stack], True),
            (backward, [*first, *back], False),
        ):
            for i, unit in enumerate(chain if depth else []):
                targets = [
                    fsdp_module(model, part.names[0])
                    for later in chain[i + 1 : i + 1 + depth]
                    for part in ((later, *later.inner) if is_forward else (later, *reversed(later.inner)))
                ]
                module = fsdp_module(model, unit.names[0])
                if is_forward:
                    module.set_modules_to_forward_prefetch(targets)
                else:
                    module.set_modules_to_backward_prefetch(targets)


def _params(model: nn.Module, unit: FSDPUnit, units: Sequence[FSDPUnit]) -> list[nn.Parameter]:
    return [p for part in (unit, *unit.inner) for p in managed(model, part, units).values()]
