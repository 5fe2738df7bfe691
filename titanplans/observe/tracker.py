"""Where a training step is: in which module, and whether forward, backward or recomputation.

    with ExitStack() as stack:
        places = follow(model, stack)
        ...                     # one step; at any moment in it:
        places.now()

Nothing is hooked: forward hooks would be traced into a compiled block, which would be compiled once more when they go.
Instead the call of each module is wrapped where `nn.Module.__call__` looks for a compiled one, and FSDP2's units where
they gather and reduce. Compiled code is left untouched. torch's `CommDebugMode` is not used: it knows no
sizes, and books a collective of the backward on the module whose outputs' gradients came last.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanplans.observe.operators import Phase
from titanplans.torch_private.autograd import in_backward, number_of_node, running_node, sequence_number
from titanplans.torch_private.ddp import DDP
from titanplans.torch_private.fsdp import fsdp_group
from titanplans.torch_private.modules import CHECKPOINTED, COMPILED_CALL, compiled_call, plain_call


class ModuleTracker:
    """Where the step is. Made by `follow`.

    Autograd numbers its nodes in the order in which the forward makes them. Remembering at which number each module was
    entered and left, the node that runs in the backward names the module in whose forward it was made. What an
    FSDP2 unit gathers and reduces belongs to the unit, however early it is prefetched.

    Attributes:
        module: the innermost module whose forward runs; None outside of the model.
        calls: how often each module was called, by its name; recomputations included.
        compiled_calls: how often the compiled form of it was.
        on_change: called with `module` before another module runs.
    """

    def __init__(self, model: nn.Module):
        self.module: str | None = None
        self.calls: Counter[str] = Counter()
        self.compiled_calls: Counter[str] = Counter()
        self.on_change: Callable[[str | None], None] = lambda module: None
        self._owners = {id(p): plain(name).rpartition(".")[0] for name, p in model.named_parameters()}
        # The reducer sums buckets, of many modules' gradients: in whose backward it does so says nothing.
        self._buckets = isinstance(model, DDP)
        self._stack: list[str] = []
        self._units: list[str] = []
        self._outside: Phase = "forward"
        self._logging = False
        self._numbers: list[int] = []
        self._modules: list[str | None] = []
        self._note()

    def now(self) -> tuple[str | None, Phase]:
        """Return the module and the phase; a compiled graph's recomputation counts as backward, as one graph does both."""
        backward = in_backward()
        if backward:
            self._outside = "update"
        if self._logging:
            return None, "log"
        if self._units:
            return self._units[-1], "backward" if backward else "forward"
        if self._stack:
            return self._stack[-1], "recomputed" if backward else "forward"
        if backward:
            return None if self._buckets else self._of_node(), "backward"
        return None, self._outside

    @property
    def in_unit(self) -> bool:
        """Whether a unit of FSDP2 gathers or reduces."""
        return bool(self._units)

    def log_begins(self) -> None:
        """From now on collectives are for the log alone, and not in every step."""
        self._logging = True

    def enter(self, name: str, compiled: bool) -> None:
        """A module is called."""
        if not in_backward():
            self._outside = "forward"
        self.calls[name] += 1
        self.compiled_calls[name] += compiled
        self._stack.append(name)
        self._note()

    def leave(self) -> None:
        """The innermost call ends."""
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self.on_change(self.module)
        self.module = self._stack[-1] if self._stack else None
        if not in_backward():  # nodes of a recomputation are never run backward
            self._numbers.append(sequence_number())
            self._modules.append(self.module)

    def _of_node(self) -> str | None:
        node = running_node()
        if node is None:
            return None
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            return self._owners.get(id(leaf))
        place = bisect_right(self._numbers, number_of_node(node))
        return self._modules[place - 1] if place else None


def follow(model: nn.Module, stack: ExitStack) -> ModuleTracker:
    """Follow the forwards and backwards of `model`, split or not, compiled or not, until `stack` closes."""
    places = ModuleTracker(model)
    for name, module in list(_outside_of_graphs(model)):
        compiled = compiled_call(module)
        enter = partial(places.enter, name, compiled is not None)
        call = plain_call(module) if compiled is None else compiled
        _wrap(stack, module, COMPILED_CALL, call, enter, places.leave)
    for name, unit in fsdp_units(model):
        enter = partial(places._units.append, name)
        for method in ("unshard", "post_backward"):
            _wrap(stack, unit, method, getattr(unit, method), enter, places._units.pop)
    return places


def fsdp_units(model: nn.Module) -> list[tuple[str, Any]]:
    """Return FSDP2's parameter groups, each with the name of its first module; "" is the model."""
    units: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            group: Any = fsdp_group(module)
            if group is not None:
                units.setdefault(id(group), (plain(name), group))
    return list(units.values())


def plain(name: str) -> str:
    """Return a module's name without the wrappers of activation checkpointing."""
    return name.replace(f".{CHECKPOINTED}", "")


def _outside_of_graphs(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, with its name, but for those within compiled ones."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) not in inside:
            yield plain(name), module
            if compiled_call(module) is not None:
                inside |= {id(inner) for inner in module.modules()}


def _wrap(
    stack: ExitStack,
    owner: Any,
    name: str,
    call: Callable[..., Any],
    enter: Callable[[], object],
    leave: Callable[[], object],
) -> None:
    """Until `stack` closes, let `owner` have an attribute `name` of its own: `call` between `enter` and `leave`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            return call(*args, **kwargs)
        finally:
            leave()

    own = owner.__dict__
    if name in own:
        stack.callback(own.__setitem__, name, own[name])
    else:
        stack.callback(own.pop, name, None)
    own[name] = wrapped
