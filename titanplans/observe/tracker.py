"""Tracks the module and the phase (forward, backward, recomputation, update, log) that a training step is in.

    with ExitStack() as stack:
        places = follow(model, stack)
        ...                     # one step; at any moment in it:
        places.now()

torch's `CommDebugMode` is not used: it records no sizes, and it assigns each collective of the backward to the last module
that has received gradients of its outputs.
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
    """The module and the phase that a step is in. Made by `follow`.

    Autograd numbers its nodes in the order in which the forward creates them. The current number is noted whenever a
    module is entered or left. So in the backward the number of the running node shows in which module's forward the node
    was created. All-gathers and reduce-scatters of an FSDP module belong to that module, even if they are prefetched.

    Attributes:
        module: the innermost module whose forward runs; None outside of the model.
        calls: number of calls of each module by name, with recomputations.
        compiled_calls: the number of these calls that ran compiled.
        on_change: is called with the current `module` before `module` changes.
    """

    def __init__(self, model: nn.Module):
        self.module: str | None = None
        self.calls: Counter[str] = Counter()
        self.compiled_calls: Counter[str] = Counter()
        self.on_change: Callable[[str | None], None] = lambda module: None
        self._owners = {id(p): plain(name).rpartition(".")[0] for name, p in model.named_parameters()}
        # DDP's reducer sums buckets with gradients of many modules, so the running backward does not show whose gradients
        # they are.
        self._has_buckets = isinstance(model, DDP)
        self._stack: list[str] = []
        # The FSDP modules that gather or reduce now, and whether they reduce.
        self._units: list[tuple[str, bool]] = []
        self._outside: Phase = "forward"
        self._logging = False
        self._numbers: list[int] = []
        self._modules: list[str | None] = []
        self._note()

    def now(self) -> tuple[str | None, Phase]:
        """Return the module (None outside of the model) and the phase that run now."""
        # A compiled graph's recomputation counts as backward, since one graph does both.
        backward = in_backward()
        if backward:
            self._outside = "update"
        if self._logging:
            return None, "log"
        if self._units:
            # A pipeline's schedule reduces gradients after the backward.
            name, reduces = self._units[-1]
            return name, "backward" if backward or reduces else "forward"
        if self._stack:
            return self._stack[-1], "recomputed" if backward else "forward"
        if backward:
            return None if self._has_buckets else self._module_of_node(), "backward"
        return None, self._outside

    @property
    def in_unit(self) -> bool:
        """Whether an FSDP module gathers or reduces now."""
        return bool(self._units)

    def log_begins(self) -> None:
        """Assign all later collectives to the phase "log", since not every step writes the log."""
        self._logging = True

    def skip(self, phase: Phase) -> None:
        """Set the phase as it would be after a forward or a backward that was left out."""
        self._outside = "forward" if phase == "forward" else "update"

    def enter(self, name: str, compiled: bool) -> None:
        """Note that a module is called."""
        if not in_backward():
            self._outside = "forward"
        self.calls[name] += 1
        self.compiled_calls[name] += compiled
        self._stack.append(name)
        self._note()

    def leave(self) -> None:
        """Note that the innermost call ends."""
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self.on_change(self.module)
        self.module = self._stack[-1] if self._stack else None
        if not in_backward():  # nodes that a recomputation creates never run
            self._numbers.append(sequence_number())
            self._modules.append(self.module)

    def _module_of_node(self) -> str | None:
        node = running_node()
        if node is None:
            return None
        # A node that accumulates a parameter's gradient has the parameter.
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            return self._owners.get(id(leaf))
        index = bisect_right(self._numbers, number_of_node(node))
        return self._modules[index - 1] if index else None


def follow(model: nn.Module, stack: ExitStack) -> ModuleTracker:
    """Follow the forwards and backwards of `model`, split or not, compiled or not, until `stack` closes."""
    places = ModuleTracker(model)
    # Forward hooks would be traced into a compiled block, which would be compiled again when they are removed. So the call
    # of a module is wrapped where `nn.Module.__call__` looks for a compiled call, and compiled code stays as it is.
    for name, module in list(_outside_of_graphs(model)):
        compiled = compiled_call(module)
        enter = partial(places.enter, name, compiled is not None)
        call = plain_call(module) if compiled is None else compiled
        _wrap(stack, module, COMPILED_CALL, call, enter, places.leave)
    for name, unit in fsdp_units(model):
        for method in ("unshard", "wait_for_unshard", "post_backward"):
            enter = partial(places._units.append, (name, method == "post_backward"))
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
    """Yield each module once, with its name, except for modules inside of compiled ones."""
    in_graphs: set[int] = set()
    for name, module in model.named_modules():
        if id(module) not in in_graphs:
            yield plain(name), module
            if compiled_call(module) is not None:
                in_graphs |= {id(inner) for inner in module.modules()}


def _wrap(
    stack: ExitStack,
    owner: Any,
    name: str,
    call: Callable[..., Any],
    enter: Callable[[], object],
    leave: Callable[[], object],
) -> None:
    """Until `stack` closes, set the attribute `name` of `owner` to a function that calls `enter`, `call` and `leave`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            return call(*args, **kwargs)
        finally:
            leave()

    attributes = owner.__dict__
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name, None)
    attributes[name] = wrapped
