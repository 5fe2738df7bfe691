"""A region that mixes tokens, cut by tokens: its code gets a sequence that looks whole, its exit takes own tokens."""

from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.plan.styles.region import Region
from titanplans.split.state import make_state
from titanplans.split.stream import Border
from titanplans.split.tensors.rules import on_input, on_output
from titanplans.split.tokens.looks_whole import LooksWhole, look_whole

Reader = tuple[nn.Module, tuple[nn.Module, ...]]
"""A projection, and the modules that work token by token between the region's input and it, such as a low rank's first."""


class Readers:
    """Which projections read the input of a region: all are exchanged together once the first is called.

    They are learnt in forwards, where each that is new is exchanged by itself, as it is again if that is recomputed.
    """

    def __init__(self) -> None:
        self.found: dict[Reader, None] = {}
        self._newest = -1
        self._known: list[tuple[int, tuple[Reader, ...]]] = []
        """What was known from the forward of this number on."""

    def known(self, forward: int) -> tuple[Reader, ...]:
        """Return what was known to read the input when the forward of this number began, in order."""
        if forward > self._newest:  # not recomputed
            self._newest = forward
            if not self._known or len(self.found) > len(self._known[-1][1]):
                self._known.append((forward, tuple(self.found)))
        return next((known for first, known in reversed(self._known) if first <= forward), ())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Readers":
        return Readers()


class Entered:
    """One call of a region.

    Attributes:
        known: its projections, known from an earlier forward.
        shard: own tokens at its entry.
        passed: what modules before the projections have made, and nothing has asked for yet.
        ready: what has been exchanged, and nothing has asked for yet.
    """

    def __init__(self, readers: Readers, forward: int, shard: torch.Tensor):
        self.readers, self.known, self.shard = readers, readers.known(forward), shard
        self.passed: dict[Reader, LooksWhole] = {}
        self.ready: dict[Reader, torch.Tensor] = {}


def install_region(style: Region, module: nn.Module, border: Border) -> None:
    """Let `module` work on the whole sequence, as far as its code can tell."""
    make_state(module).readers = Readers()
    module.register_forward_pre_hook(partial(_enter, style, border), with_kwargs=True)
    if style.reduce_output:
        module.register_forward_hook(partial(_leave, style, border), with_kwargs=True)


def _enter(style: Region, border: Border, module: nn.Module, args: Any, kwargs: Any) -> Any:
    tokens, readers = border.tokens, make_state(module).readers
    assert tokens is not None

    def enter(x: torch.Tensor) -> LooksWhole:
        length = border.length_of(x)
        own = border.enter(x)
        whole = look_whole(own, tokens, length)
        whole.region = Entered(readers, border.stream.forward(), own)
        border.within = whole.shape
        return whole

    return on_input(enter, style, style.input_name, module, args, {**kwargs, **style.arguments})


def _leave(style: Region, border: Border, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    tokens = border.tokens
    assert tokens is not None

    def leave(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, LooksWhole):
            return border.leave(x.shard)
        lead = border.within[:-1]
        return border.leave(tokens.sum(x.unflatten(0, lead) if len(lead) > 1 and x.ndim == 2 else x))

    return on_output(leave, output)
