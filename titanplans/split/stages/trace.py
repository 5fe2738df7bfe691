"""Trace one forward of a model to find the tensors that have to cross from stage to stage: `trace`.

A value is a tensor that a block returns, or that a module before the blocks returns, such as the embedding. The arguments of
a block are such values, or tensors that every stage computes itself: masks, positions, rotary tables.
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
    meta_nonzero_finds_all,
    storage_id,
    tree_flatten,
    tree_leaves,
    version,
)


class Value(NamedTuple):
    """A tensor that a block, or a module before the blocks, returns."""

    block: int
    """The index of the block; -1: a module before the blocks."""
    module: str
    """The name of the block or of the module."""
    leaf: int
    """The index among the leaves of the block's result; for a module before the blocks, the index of its call."""


class Returned(NamedTuple):
    """A leaf of a block's result."""

    constant: Any
    """A leaf that is not a tensor; None for a tensor."""
    argument: int | None
    """The index of the leaf among the block's arguments that is this tensor, or else has its shape; None: there is
    none."""
    value: Value | None
    """None: it is not a tensor, or it is an argument that the block returns unchanged."""


class BlockCall(NamedTuple):
    """One call of a block."""

    needs: frozenset[Value]
    """The values that the block's arguments consist of, or are computed from."""
    returned: tuple[Returned, ...]
    structure: TreeSpec
    """The structure of its result."""


class OutsideCall(NamedTuple):
    """The calls of one module outside of the blocks."""

    first: int
    """How many blocks had been called before its first call."""
    last: int
    """How many blocks had been called before its last call."""
    keeps_shape: bool
    """Each call returned a tensor with its input's shape."""
    width: int | None
    """The last dimension of each call's result; None: it varies, or the result was not a tensor [*shape of ids, width] or
    [*shape of hidden states without their last dimension, width]."""


class Trace(NamedTuple):
    """One forward of a model."""

    calls: tuple[BlockCall, ...]
    end: frozenset[Value]
    """The values that the logits are computed from."""
    outside: Mapping[str, OutsideCall]
    """The called modules outside of the blocks that hold parameters and no other modules, by name."""

    def crossing(self, index: int) -> tuple[Value, ...]:
        """Return the values made before the block `index` that this block, a later one or the logits need."""
        if index == 0:
            return ()
        needed = self.end.union(*(call.needs for call in self.calls[index:]))
        return tuple(sorted(value for value in needed if value.block < index))


MOST_READS = 100_000
"""A forward may convert this many tensors to Python numbers; on meta each number is 0, so a loop might never end."""
LOSS_FIELDS = ("_loss", "router_logits")
"""Suffixes of the output fields that a model returns for its loss, next to the logits."""
SHAPE_ALONE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
        "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    )
)  # fmt: skip
"""Operators that use the shape, dtype and device of a tensor, but not its values."""


class _Origins(TorchDispatchMode):
    """Records, for each storage, the values from which the operators between blocks have computed its content."""

    def __init__(self) -> None:
        super().__init__()
        self.block: int | None = None
        """The index of the running block; None: the model's own code runs."""
        self._reads = 0
        self.has_read = False
        """The running block has converted a tensor to a Python number."""
        # The storage is referenced, so that no other one gets its address.
        self._values: dict[int, tuple[torch.UntypedStorage, frozenset[Value]]] = {}

    def of(self, tensor: torch.Tensor) -> frozenset[Value]:
        entry = self._values.get(storage_id(tensor))
        return frozenset() if entry is None else entry[1]

    def of_all(self, tree: Any) -> frozenset[Value]:
        return frozenset().union(*map(self.of, _tensors(tree)))

    def note(self, tensor: torch.Tensor, values: frozenset[Value]) -> None:
        self._values[storage_id(tensor)] = tensor.untyped_storage(), values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if self.block is None and self.of(args[0]):
                raise ParallelError(
                    "its code between blocks converts hidden states to a Python number, which other stages do not have"
                )
            self.has_read, self._reads = True, self._reads + 1
            if self._reads > MOST_READS:
                raise ParallelError(
                    f"it converts tensors to Python numbers more than {MOST_READS:,} times, perhaps in a loop that "
                    "waits for a value"
                )
            if args[0].is_meta:  # for example whether a mask excludes anything
                return False if args[0].dtype == torch.bool else 0
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in SHAPE_ALONE and (made_of := self.of_all((args, kwargs))):
            for tensor in _tensors(out):
                self.note(tensor, self.of(tensor) | made_of)
        return out


def trace(model: nn.Module, decoder: Decoder, inputs: Mapping[str, Any]) -> Trace:
    """Run `model` on `inputs`, keyword arguments of its forward, and record the arguments and results of its blocks.

    The model may be on any device; on meta, call this inside `titanplans.kernels.for_meta`, since Triton kernels do not run
    there.

    Raises:
        ParallelError: it does not call each block once, in order, or a block returns an object that can't be sent.
    """
    calls: list[BlockCall] = []
    arguments: list[Any] = []
    versions: list[int] = []
    outside: dict[str, OutsideCall] = {}
    made_of: dict[Value, frozenset[Value]] = {}

    def enter(index: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        if origins.block is not None or index != len(calls):
            before = (
                "while another block runs" if origins.block is not None else f"when block {len(calls)} is due"
            )
            raise ParallelError(
                f"it calls {decoder.names[index]} {before}: a stage runs blocks once and in order"
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
                    f"{name} returns a {class_name(leaf)}, which can't be sent to another stage: return tensors, or a tuple "
                    "or dict of them"
                )
            if origins.has_read and isinstance(leaf, int | float):
                raise ParallelError(
                    f"{name} converts a tensor to a Python number and returns {leaf!r}, which other stages can't know: "
                    "return a tensor"
                )
        unchanged = [  # a block that has read a number from a tensor may return another tensor for another number
            not origins.has_read and (not isinstance(x, torch.Tensor) or version(x) == before)
            for x, before in zip(arguments, versions, strict=True)
        ]
        returned = tuple(
            _returned(Value(index, name, at), leaf, arguments, unchanged) for at, leaf in enumerate(leaves)
        )
        new_leaves = [
            (leaf, result.value)
            for leaf, result in zip(leaves, returned, strict=True)
            if result.value is not None
        ]
        for leaf, _ in new_leaves:  # several may have one storage
            values = (value for other, value in new_leaves if storage_id(other) == storage_id(leaf))
            origins.note(leaf, frozenset(values))
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

    with ExitStack() as stack, torch.no_grad(), meta_nonzero_finds_all(), _Origins() as origins:
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
        """Replace each value that is not sent, since every stage calls its module, with the values that it is computed
        from."""
        sendable = {value for value in values if value.block >= 0 or is_before(outside[value.module])}
        sources = (made_of[value] for value in values - sendable)
        return frozenset(sendable).union(*map(expanded, sources))

    calls = [call._replace(needs=expanded(call.needs)) for call in calls]
    return Trace(tuple(calls), expanded(end), outside)


def is_before(call: OutsideCall) -> bool:
    """Whether a module is called only before the blocks, and a stand-in can replace it in all stages but the first."""
    return call.last == 0 and (call.keeps_shape or call.width is not None)


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the argument that keeps the forward of `model` from returning a cache; {} if it takes none."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def logits_of(output: Any) -> Any:
    """Return the logits [..., vocabulary] of a model's output; with loss parallelism a DTensor, `Shard(-1)`."""
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    return output["logits"] if isinstance(output, Mapping) else output[0]


def read_by_loss(output: Any) -> list[Any]:
    """Return the part of a model's output that the loss uses: its logits, and the inputs of a load-balancing loss."""
    names = () if isinstance(output, torch.Tensor) else dir(output)
    balance = [getattr(output, name) for name in names if name.endswith(LOSS_FIELDS)]
    return [logits_of(output), *balance]


def _outside_of_blocks(model: nn.Module, decoder: Decoder) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        inside = any(name == block or within(name, block) for block in decoder.names)
        if not inside and not module._modules and next(module.parameters(), None) is not None:
            yield name, module


def _returned(value: Value, leaf: Any, arguments: list[Any], unchanged: list[bool]) -> Returned:
    if not isinstance(leaf, torch.Tensor):
        return Returned(leaf, None, None)
    index = next((i for i, x in enumerate(arguments) if x is leaf), None)
    if index is not None and unchanged[index]:
        return Returned(None, index, None)
    same_shape = (i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and x.shape == leaf.shape)
    return Returned(None, next(same_shape, None), value)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
