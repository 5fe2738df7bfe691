"""What the blocks of a model hand to each other, seen in one forward: which tensors cross from stage to stage.

A value is a tensor that a block makes. What a block is given is an earlier value, something that the model's code makes of
values between blocks, or something that each stage can make itself: masks, positions, rotary tables.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.plan.decoder import Decoder, within
from titanplans.torch_private.dispatch import (
    TorchDispatchMode,
    TreeSpec,
    rows_for_meta,
    tree_flatten,
    tree_leaves,
)


class Value(NamedTuple):
    """A tensor that a block makes."""

    block: int
    leaf: int
    """Its number among the leaves of what the block returns."""


class Returned(NamedTuple):
    """A leaf of what a block returns."""

    constant: Any
    """What is no tensor, as it was; None for a tensor."""
    given: int | None
    """The leaf among the block's arguments that it is, or else one of its shape; None: there is no such."""
    value: Value | None
    """None: it is no tensor, or an argument handed on."""


class BlockCall(NamedTuple):
    """The call of a block."""

    needs: frozenset[Value]
    """The values that its arguments are, or were made of."""
    returned: tuple[Returned, ...]
    structure: TreeSpec
    """Of what it returned."""


class OutsideCall(NamedTuple):
    """The calls of a module outside of the blocks."""

    first: int
    """So many blocks were done when it was called first."""
    last: int
    keeps_shape: bool
    """It always returned a tensor of its input's shape."""


class Trace(NamedTuple):
    """One forward of a model."""

    calls: tuple[BlockCall, ...]
    end: frozenset[Value]
    """The values that the logits were made of."""
    outside: Mapping[str, OutsideCall]
    """Modules outside of the blocks that hold parameters and no other modules, if they were called."""

    def crossing(self, at: int) -> tuple[Value, ...]:
        """Return the values of the blocks before number `at` that later ones need, or the model's own code does."""
        needed = self.end.union(*(call.needs for call in self.calls[at:]))
        return tuple(sorted(value for value in needed if value.block < at))


class _Origins(TorchDispatchMode):
    """Notes the values that each tensor is made of, by the operators between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[
            int, tuple[torch.Tensor, frozenset[Value]]
        ] = {}  # a tensor that is held keeps its `id`

    def of(self, tensor: torch.Tensor) -> frozenset[Value]:
        return self._known[id(tensor)][1] if id(tensor) in self._known else frozenset()

    def of_all(self, tree: Any) -> frozenset[Value]:
        return frozenset().union(*map(self.of, _tensors(tree)))

    def note(self, tensor: torch.Tensor, values: frozenset[Value]) -> None:
        self._known[id(tensor)] = (tensor, values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return False if args[0].dtype == torch.bool else 0  # such as whether a mask leaves anything out
        out = func(*args, **(kwargs or {}))
        if made_of := self.of_all((args, kwargs)):
            for tensor in _tensors(out):
                self.note(tensor, self.of(tensor) | made_of)
        return out


def trace(model: nn.Module, decoder: Decoder, inputs: Mapping[str, Any]) -> Trace:
    """Run `model` on `inputs`, keyword arguments of its forward, and note what its blocks are given and return.

    On any device; on meta inside of `titanplans.kernels.for_meta`, since Triton kernels do not run there.
    """
    calls: dict[int, BlockCall] = {}
    given: dict[int, list[Any]] = {}
    outside: dict[str, OutsideCall] = {}

    def enter(number: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        given[number] = tree_leaves((args, kwargs))

    def leave(number: int, block: nn.Module, args: Any, output: Any) -> None:
        needs = origins.of_all(given[number])
        leaves, structure = tree_flatten(output)
        returned = tuple(_returned(Value(number, at), leaf, given[number]) for at, leaf in enumerate(leaves))
        for leaf, one in zip(leaves, returned, strict=True):
            if one.value is not None:
                origins.note(leaf, frozenset({one.value}))
        calls[number] = BlockCall(needs, returned, structure)

    def called(name: str, module: nn.Module, args: Any, output: Any) -> None:
        keeps = bool(args) and isinstance(output, torch.Tensor) and output.shape == args[0].shape
        before = outside.get(name, OutsideCall(len(calls), len(calls), True))
        outside[name] = OutsideCall(before.first, len(calls), before.keeps_shape and keeps)

    with ExitStack() as stack, torch.no_grad(), rows_for_meta(), _Origins() as origins:
        for number, name in enumerate(decoder.names):
            block = model.get_submodule(name)
            hook = partial(enter, number)
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(partial(leave, number)).remove)
        for name, module in _outside_of_blocks(model, decoder):
            stack.callback(module.register_forward_hook(partial(called, name)).remove)
        end = origins.of_all(model(**inputs, use_cache=False))
    return Trace(tuple(calls[number] for number in range(len(decoder.names))), end, outside)


def _outside_of_blocks(model: nn.Module, decoder: Decoder) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        inside = any(name == block or within(name, block) for block in decoder.names)
        if not inside and not module._modules and next(module.parameters(), None) is not None:
            yield name, module


def _returned(value: Value, leaf: Any, given: list[Any]) -> Returned:
    if not isinstance(leaf, torch.Tensor):
        return Returned(leaf, None, None)
    handed_on = next((at for at, x in enumerate(given) if x is leaf), None)
    if handed_on is not None:
        return Returned(None, handed_on, None)
    alike = (at for at, x in enumerate(given) if isinstance(x, torch.Tensor) and x.shape == leaf.shape)
    return Returned(None, next(alike, None), value)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
