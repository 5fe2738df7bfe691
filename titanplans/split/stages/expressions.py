"""Number the expressions that a forward computes, as compilers do it (value numbering): `Expressions`.

Two tensors with one number result from the same operators on the same parameters, inputs and constants, so they have
equal values and equal gradients. No value is used, so forwards can be compared on meta.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titanplans.split.stages.trace import SHAPE_ALONE
from titanplans.torch_private.dispatch import (
    TorchDispatchMode,
    named_arguments,
    schema,
    storage_id,
    tree_leaves,
    written_tensors,
)


class _Content(NamedTuple):
    """The expression in a storage."""

    storage: torch.UntypedStorage
    """Referenced, so that no other storage gets its address."""
    number: int


class Expressions(TorchDispatchMode):
    """Numbers the expression of each tensor that is made while this mode is entered.

    Expressions are recorded by storage, so an in-place change affects all views.

    Args:
        model: the unsplit model.
        inputs: the inputs of its forward, and of the stages' forwards.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]):
        super().__init__()
        self._inputs = inputs
        self._numbers: dict[Hashable, int] = {}
        self._contents: dict[int, _Content] = {}
        self._past: list[_Content] = []
        self._names: dict[str, str] = {}
        """Maps each name of a tensor of the model to the first of its names."""
        first: dict[int, str] = {}
        for name, tensor in model_tensors(model):
            self._names[name] = first.setdefault(id(tensor), name)
        self._scope, self._unknown = "", 0
        self.answer = False
        """The value that code gets from a tensor on meta, such as whether a mask excludes anything."""
        self.has_read = False
        """The model's code has used the value of a tensor on meta."""
        self.made_of: Hashable = None
        """The running function and its arguments other than tensors."""
        self.draws: str | None = None
        """The first operator that drew random numbers; None: none did."""

    def begin(self, model: nn.Module, received: Iterable[torch.Tensor] = ()) -> None:
        """Forget all tensors except `received`. The tensors of `model` get the expressions that they have before a forward.

        `model` is a copy of the unsplit model, or a stage of it.
        """
        # A tensor that an earlier forward has left in an attribute is unknown in this one. It is kept referenced, so
        # that no other storage gets its address.
        self._past += self._contents.values()
        self._contents = {(key := storage_id(tensor)): self._contents[key] for tensor in received}
        self.reset(model)
        for name, tensor in _attributes(model):
            # A parameter or buffer may also be an attribute.
            if storage_id(tensor) not in self._contents:
                self._set(tensor, ("attribute", name))
        for name, value in self._inputs.items():
            if isinstance(value, torch.Tensor):
                self._set(value, ("input", name))

    def reset(self, model: nn.Module) -> None:
        """Give the parameters and buffers of `model` the expressions that they had before its forward."""
        for name, tensor in model_tensors(model):
            self._set(tensor, ("tensor", self._names.get(name, name)))

    def names(self, model: nn.Module, tensors: set[int]) -> frozenset[str]:
        """Return the names in the unsplit model of those tensors of `model` whose `id`s are in `tensors`."""
        return frozenset(self._names[name] for name, x in model_tensors(model) if id(x) in tensors)

    def enter(self, scope: str) -> None:
        """Begin a section of the forward: a block, or the model's own code after a block."""
        self._scope, self._unknown = scope, 0

    def made_by(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func`, a function of torch; constants that it makes on meta are identified by its arguments."""
        before = self.made_of, self._unknown
        leaves = (x for x in tree_leaves((args, kwargs)) if not isinstance(x, torch.Tensor))
        self.made_of, self._unknown = (getattr(func, "__name__", ""), *map(_constant, leaves)), 0
        try:
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                self.of(out)
            return out
        finally:
            self.made_of, self._unknown = before

    def of(self, tensor: torch.Tensor) -> int:
        """Return the number of the expression of `tensor`."""
        # Some tensors are not made by an operator, such as the index in x[:, [0]].
        if storage_id(tensor) not in self._contents:
            # On meta it has no value, so it is identified by the function that made it, or by its order in the section.
            if tensor.is_meta:
                self._unknown += 1
                self._set(tensor, ("constant", self.made_of or self._scope, self._unknown))
            else:
                self._set(tensor, ("constant", str(tensor.tolist())))
        number = self._contents[storage_id(tensor)].number
        return self._number((number, *_geometry(tensor), tensor.storage_offset()))

    def of_all(self, tree: Any) -> tuple[Hashable, ...]:
        """Return the numbers of the tensors in `tree`, and its other leaves as constants."""
        return tuple(self.of(x) if isinstance(x, torch.Tensor) else _constant(x) for x in tree_leaves(tree))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.has_read = True
            return self.answer if args[0].dtype == torch.bool else int(self.answer)
        if getattr(func, "overloadpacket", None) in SHAPE_ALONE:
            operands: Any = [
                _geometry(x) if isinstance(x, torch.Tensor) else _constant(x) for x in tree_leaves(args)
            ]
        else:
            operands = self.of_all(args)
        expression = (str(func), tuple(operands), tuple(kwargs), self.of_all(kwargs))
        if self.draws is None and _draws(func, args, kwargs):
            self.draws = str(func)
        changed = written_tensors(func, args, kwargs)
        out = func(*args, **kwargs)
        for index, tensor in enumerate(changed):
            self._set(tensor, (*expression, "changed", index))
        for index, tensor in enumerate(x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            if storage_id(tensor) not in self._contents:  # else it is a view, or was changed in place
                self._set(tensor, (*expression, index))
        return out

    def _set(self, tensor: torch.Tensor, expression: Hashable) -> None:
        self._contents[storage_id(tensor)] = _Content(tensor.untyped_storage(), self._number(expression))

    def _number(self, expression: Hashable) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))


class RunningFunction(TorchFunctionMode):
    """Tells `expressions` which function of torch runs: on meta, the result of torch.tensor(2.0) has no value."""

    def __init__(self, expressions: Expressions):
        super().__init__()
        self._expressions = expressions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._expressions.made_by(func, args, kwargs or {})


def model_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of `model` under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _attributes(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors in attributes of modules that are neither parameters nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                leaves = enumerate(tree_leaves(value))
                yield from ((f"{path}.{name}.{at}", x) for at, x in leaves if isinstance(x, torch.Tensor))


def _geometry(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _constant(x: Any) -> Hashable:
    """Return a key that tells constants apart: 1, 1.0 and True are three."""
    return (type(x).__name__, repr(x)) if isinstance(x, bool | int | float | complex) else str(x)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers; attention draws none if its dropout is 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    declared = getattr(schema(func), "arguments", ())
    defaults = {x.name: x.default_value for x in declared if x.has_default_value()}
    arguments = defaults | named_arguments(func, args, kwargs)
    return arguments.get("dropout_p", arguments.get("p", 1.0)) != 0.0
