"""Where a training step is: in which block, or part beside the blocks, and whether forward, backward or recomputation.

    with follow(model) as places:
        ...                     # one step; at any moment in it:
        places.now()

Nothing of the model is hooked: forward hooks would be traced into a compiled block, and it would be compiled once
more when they go. Instead the call of each block is bracketed from outside, where `nn.Module.__call__` looks for a
compiled one, and FSDP2's units where they gather and reduce. What happens there is seen by `collective_record` and
`compile_record`.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed._composable.replicate import DDP
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule

from titanplans.parallel.blocks import block_lists
from titanplans.tensor_parallel.decoder import find_decoder

Phase = Literal["forward", "backward", "recomputed", "update", "log"]
"""update: after the last backward. log: after `Places.log_begins`. What a compiled graph recomputes is backward, since
one graph does both."""


class Places:
    """Where the step is. Made by `follow`.

    Autograd numbers its nodes in the order in which the forward makes them: remembering at which number each part was
    entered and left, the node that runs in the backward names the part in whose forward it was made (as in
    `titanplans.proof.traffic`, which counts for a proof and knows neither recomputation nor FSDP). What an FSDP2 unit
    gathers and reduces belongs to the unit, however early it is prefetched.

    Attributes:
        part: the block, or other part, whose forward runs.
        calls: how often each part was called, by its name; recomputations included.
        compiled_calls: how often the compiled form of it was.
        changes: called with `part` before another part runs.
    """

    def __init__(self, model: nn.Module):
        self.part: str | None = None
        self.calls: Counter[str] = Counter()
        self.compiled_calls: Counter[str] = Counter()
        self.changes: list[Callable[[str | None], None]] = []
        self._names = [name for name, _ in _parts(model)]
        self._owners = {id(param): self._of(plain(name)) for name, param in model.named_parameters()}
        # The reducer sums buckets, of many modules' gradients: in whose backward it does so says nothing.
        self._buckets = isinstance(model, DDP)
        self._stack: list[str] = []
        self._units: list[str] = []
        self._outside: Phase = "forward"
        self._logging = False
        self._numbers: list[int] = []
        self._parts: list[str | None] = []
        self._note()

    def now(self) -> tuple[str | None, Phase]:
        """Return the part and the phase; the part is None outside of all parts."""
        backward = _in_backward()
        if backward:
            self._outside = "update"
        if self._logging:
            return None, "log"
        if self._units:
            return self._of(self._units[-1]), "backward" if backward else "forward"
        if self._stack:
            return self._stack[-1], "recomputed" if backward else "forward"
        if backward:
            return None if self._buckets else self._of_node(), "backward"
        return None, self._outside

    def log_begins(self) -> None:
        """What comes now is for the log alone, and not in every step."""
        self._logging = True

    def enter(self, name: str) -> None:
        if not _in_backward():
            self._outside = "forward"
        self._stack.append(name)
        self._note()

    def leave(self) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        for change in self.changes:
            change(self.part)
        self.part = self._stack[-1] if self._stack else None
        if not _in_backward():  # what a recomputation makes is never run backward
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._parts.append(self.part)

    def _of(self, name: str) -> str | None:
        """The part that the module or parameter called `name` belongs to, or else its own name."""
        return next((part for part in self._names if f"{name}.".startswith(f"{part}.")), name or None)

    def _of_node(self) -> str | None:
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            return self._owners.get(id(leaf))
        place = bisect_right(self._numbers, node._sequence_nr())
        return self._parts[place - 1] if place else None


@contextmanager
def follow(model: nn.Module) -> Iterator[Places]:
    """Follow what runs inside: forwards and backwards of `model`, which is parallelised. Not twice at a time."""
    places = Places(model)
    with ExitStack() as stack:
        for name, module in _parts(model):
            _bracket_calls(stack, places, name, module)
        for name, unit in fsdp_units(model):
            for method in ("unshard", "post_backward"):
                _bracket_unit(stack, places, name, unit, method)
        yield places


def fsdp_units(model: nn.Module) -> list[tuple[str, Any]]:
    """Return FSDP2's parameter groups, each with the name of its first module; "" is the model."""
    units: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                units.setdefault(id(group), (plain(name), group))
    return list(units.values())


def plain(name: str) -> str:
    """Return a module's name without the wrappers of activation checkpointing."""
    return name.replace("._checkpoint_wrapped_module", "")


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks, and what stands beside them: embedding, final norm, head."""
    decoder = find_decoder(model)
    names = [name for names in block_lists(model, "all") for name in names]
    names += [name for name in (decoder.embedding, decoder.norm, decoder.head) if name is not None]
    return [(name, model.get_submodule(name)) for name in names]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _bracket_calls(stack: ExitStack, places: Places, name: str, module: nn.Module) -> None:
    """Let `places` know of each call of the part `module`, and of each recomputation of something in it.

    Inside of what is compiled nothing is touched.
    """
    compiled = module._compiled_call_impl
    call = module._call_impl if compiled is None else compiled

    def bracketed(*args: Any, **kwargs: Any) -> Any:
        places.enter(name)
        places.calls[name] += 1
        places.compiled_calls[name] += compiled is not None
        try:
            return call(*args, **kwargs)
        finally:
            places.leave()

    _replace(stack, module, "_compiled_call_impl", bracketed)
    if compiled is None:
        for inner in _recomputed(module):
            _bracket_calls(stack, places, name, inner)


def _recomputed(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in `module` that a recomputation calls, but not inside of what is compiled."""
    if isinstance(module, ActivationWrapper):
        yield module._checkpoint_wrapped_module  # pyrefly: ignore[invalid-yield]
        return
    for child in module.children():
        if child._compiled_call_impl is None:
            yield from _recomputed(child)


def _bracket_unit(stack: ExitStack, places: Places, name: str, unit: Any, method: str) -> None:
    call: Callable[..., Any] = getattr(unit, method)

    def bracketed(*args: Any, **kwargs: Any) -> Any:
        places._units.append(name)
        try:
            return call(*args, **kwargs)
        finally:
            places._units.pop()

    _replace(stack, unit, method, bracketed)


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Give `owner` an attribute of its own until `stack` closes, then what it had."""
    own = owner.__dict__
    if name in own:
        stack.callback(own.__setitem__, name, own[name])
    else:
        stack.callback(own.pop, name)
    own[name] = value
