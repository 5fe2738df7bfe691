"""Trace one forward of a model: which tensors have to cross from stage to stage.

A value is a tensor that a block returns, or a module that stands before the blocks, such as the embedding. An argument of a
block is made of values, or of what each stage makes itself: masks, positions, rotary tables.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.errors import ParallelError
from titanplans.split.decoder import Decoder, within
from titanplans.text import class_name
from titanplans.torch_private.dispatch import (
    TorchDispatchMode,
    TreeSpec,
    rows_for_meta,
    storage_id,
    tree_flatten,
    tree_leaves,
    version,
)


class Value(NamedTuple):
    """A tensor that a block returns, or a module before the blocks."""

    block: int
    """The index of the block; -1: a module before the blocks."""
    module: str
    """The name of the block or of the module."""
    leaf: int
    """The index among the leaves of what the block returns; of a module before the blocks, the index of its call."""


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
    """How many blocks had been called before its first call."""
    last: int
    """How many blocks had been called before its last call."""
    keeps_shape: bool
    """Each call returned a tensor of its input's shape."""
    width: int | None
    """The last dimension of what each call returned; None: that varies, or it was no tensor [*shape of ids, width], nor
    [*shape of hidden states without their last dimension, width]."""


class Trace(NamedTuple):
    """One forward of a model."""

    calls: tuple[BlockCall, ...]
    end: frozenset[Value]
    """The values that the logits were made of."""
    outside: Mapping[str, OutsideCall]
    """Modules outside of the blocks that hold parameters and no other modules, if they were called."""

    def crossing(self, at: int) -> tuple[Value, ...]:
        """Return the values made before the block of index `at` that it or a later one needs, or the logits."""
        if at == 0:
            return ()
        needed = self.end.union(*(call.needs for call in self.calls[at:]))
        return tuple(sorted(value for value in needed if value.block < at))


MOST_READS = 100_000
"""Numbers that a forward may read from tensors: on meta each is 0, so a loop may never end."""
LOSS_FIELDS = ("_loss", "router_logits")
"""So end the names of what a model returns for its loss next to its logits."""
SHAPE_ALONE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
        "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    )
)  # fmt: skip
"""Operators that read the shape, dtype and device of a tensor, and not its values."""


class _Origins(TorchDispatchMode):
    """Notes the values that the content of each storage is made of, by the operators between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.block: int | None = None
        """The index of the block that runs; None: the model's own code."""
        self._reads = 0
        self.has_read = False
        """The block that runs has made a Python number of a tensor."""
        # A storage that is held keeps its address.
        self._known: dict[int, tuple[torch.UntypedStorage, frozenset[Value]]] = {}

    def of(self, tensor: torch.Tensor) -> frozenset[Value]:
        known = self._known.get(storage_id(tensor))
        return frozenset() if known is None else known[1]

    def of_all(self, tree: Any) -> frozenset[Value]:
        return frozenset().union(*map(self.of, _tensors(tree)))

    def note(self, tensor: torch.Tensor, values: frozenset[Value]) -> None:
        self._known[storage_id(tensor)] = tensor.untyped_storage(), values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if self.block is None and self.of(args[0]):
                raise ParallelError(
                    "its code between blocks makes a Python number of hidden states, which other stages do not have"
                )
            self.has_read, self._reads = True, self._reads + 1
            if self._reads > MOST_READS:
                raise ParallelError(
                    f"it makes more than {MOST_READS:,} Python numbers of tensors, perhaps in a loop that waits for a value"
                )
            if args[0].is_meta:  # such as whether a mask leaves anything out
                return False if args[0].dtype == torch.bool else 0
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in SHAPE_ALONE and (made_of := self.of_all((args, kwargs))):
            for tensor in _tensors(out):
                self.note(tensor, self.of(tensor) | made_of)
        return out


def trace(model: nn.Module, decoder: Decoder, inputs: Mapping[str, Any]) -> Trace:
    """Run `model` on `inputs`, keyword arguments of its forward, and note what its blocks are given and return.

    On any device; on meta inside of `titanplans.kernels.for_meta`, since Triton kernels do not run there.

    Raises:
        ParallelError: it does not call each block once, in order, or a block returns what can't be handed on.
    """
    calls: list[BlockCall] = []
    arguments: list[Any] = []
    versions: list[int] = []
    outside: dict[str, OutsideCall] = {}
    made_of: dict[Value, frozenset[Value]] = {}

    def enter(index: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        if origins.block is not None or index != len(calls):
            before = "another one runs" if origins.block is not None else f"block {len(calls)} is due"
            raise ParallelError(
                f"it calls {decoder.names[index]} where {before}: a stage runs blocks once and in order"
            )
        origins.block, origins.has_read = index, False
        arguments[:] = tree_leaves((args, kwargs))
        versions[:] = [version(x) if isinstance(x, torch.Tensor) else 0 for x in arguments]

    def leave(index: int, block: nn.Module, args: Any, output: Any) -> None:
        origins.block = None
        name = decoder.names[index]
        needs = origins.of_all(arguments)
        leaves, structure = tree_flatten(output)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor | bool | int | float | str | None):
                raise ParallelError(
                    f"{name} returns a {class_name(leaf)}, which no other stage can hand on: return tensors, or a tuple or "
                    "dict of them"
                )
            if origins.has_read and isinstance(leaf, int | float):
                raise ParallelError(
                    f"{name} makes a Python number of a tensor and returns {leaf!r}, which other stages can't know: "
                    "return a tensor"
                )
        unchanged = [  # a block that reads a value may hand on another tensor then
            not origins.has_read and (not isinstance(x, torch.Tensor) or version(x) == before)
            for x, before in zip(arguments, versions, strict=True)
        ]
        returned = tuple(
            _returned(Value(index, name, at), leaf, arguments, unchanged) for at, leaf in enumerate(leaves)
        )
        made = [
            (leaf, one.value) for leaf, one in zip(leaves, returned, strict=True) if one.value is not None
        ]
        for leaf, _ in made:  # several may have one storage
            same = (value for other, value in made if storage_id(other) == storage_id(leaf))
            origins.note(leaf, frozenset(same))
        calls.append(BlockCall(needs, returned, structure))

    def called(name: str, module: nn.Module, args: Any, output: Any) -> None:
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        keeps, width = False, None
        if x is not None and isinstance(output, torch.Tensor):
            keeps = output.shape == x.shape
            leading = x.shape[:-1] if x.is_floating_point() else x.shape
            width = output.shape[-1] if output.shape[:-1] == leading else None
        before = outside.get(name, OutsideCall(len(calls), len(calls), True, width))
        keeps, width = before.keeps_shape and keeps, width if width == before.width else None
        outside[name] = OutsideCall(before.first, len(calls), keeps, width)
        if not calls and isinstance(output, torch.Tensor):
            value = Value(-1, name, sum(value.module == name for value in made_of))
            made_of[value] = origins.of_all((args, output))
            origins.note(output, frozenset({value}))

    with ExitStack() as stack, torch.no_grad(), rows_for_meta(), _Origins() as origins:
        for index, name in enumerate(decoder.names):
            block = model.get_submodule(name)
            hook = partial(enter, index)
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(partial(leave, index)).remove)
        for name, module in _outside_of_blocks(model, decoder):
            stack.callback(module.register_forward_hook(partial(called, name)).remove)
        end = origins.of_all(read_by_loss(model(**inputs, **without_cache(model))))
    if len(calls) < len(decoder.names):
        raise ParallelError(f"it does not call {decoder.names[len(calls)]}: a stage runs each of its blocks")

    def expanded(values: frozenset[Value]) -> frozenset[Value]:
        """Replace a value that no stage can give, of a module that every stage calls, by those that it is made of."""
        kept = {value for value in values if value.block >= 0 or is_before(outside[value.module])}
        made = (made_of[value] for value in values - kept)
        return frozenset(kept).union(*map(expanded, made))

    calls = [call._replace(needs=expanded(call.needs)) for call in calls]
    return Trace(tuple(calls), expanded(end), outside)


def is_before(call: OutsideCall) -> bool:
    """Whether a module is called before the blocks alone, and has a stand-in: other stages get what it gives."""
    return call.last == 0 and (call.keeps_shape or call.width is not None)


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the argument that keeps the forward of `model` from returning a cache, if it takes one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def logits_of(output: Any) -> Any:
    """Return the logits [..., vocabulary] of a model's output; with loss parallelism a DTensor, `Shard(-1)`."""
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    return output["logits"] if isinstance(output, Mapping) else output[0]


def read_by_loss(output: Any) -> list[Any]:
    """Return what of a model's output the loss reads: its logits, and what the balance of routers is computed of."""
    names = () if isinstance(output, torch.Tensor) else dir(output)
    balance = [getattr(output, name) for name in names if name.endswith(LOSS_FIELDS)]
    return [logits_of(output), *balance]


def _outside_of_blocks(model: nn.Module, decoder: Decoder) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        inside = any(name == block or within(name, block) for block in decoder.names)
        if not inside and not module._modules and next(module.parameters(), None) is not None:
            yield name, module


def _returned(value: Value, leaf: Any, given: list[Any], unchanged: list[bool]) -> Returned:
    if not isinstance(leaf, torch.Tensor):
        return Returned(leaf, None, None)
    handed_on = next((at for at, x in enumerate(given) if x is leaf), None)
    if handed_on is not None and unchanged[handed_on]:
        return Returned(None, handed_on, None)
    alike = (at for at, x in enumerate(given) if isinstance(x, torch.Tensor) and x.shape == leaf.shape)
    return Returned(None, next(alike, None), value)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
