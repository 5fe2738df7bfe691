"""Number the expressions that a forward computes (value numbering, as compilers do it), without looking at a value.

Two tensors of one number are the same operators applied to the same parameters, inputs and constants: they have equal values
and equal gradients. So two forwards can be compared on meta.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titanplans.split.stages.trace import SHAPE_ALONE
from titanplans.torch_private.dispatch import TorchDispatchMode, schema, storage_id, tree_leaves


class _Content(NamedTuple):
    """What a storage holds."""

    storage: torch.UntypedStorage
    """Held, so that no other one gets its address."""
    number: int


class Expressions(TorchDispatchMode):
    """Numbers the expression of each tensor that is made while this is entered.

    Contents are those of storages, so a change in place changes what all views of one are.

    Args:
        model: the unsplit model.
        inputs: of its forward, which the forwards of stages get, too.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]):
        super().__init__()
        self._inputs = inputs
        self._numbers: dict[Hashable, int] = {}
        self._contents: dict[int, _Content] = {}
        self._past: list[_Content] = []
        self._names: dict[str, str] = {}
        """Each name of a tensor of the model, and the first of its names."""
        first: dict[int, str] = {}
        for name, tensor in own_tensors(model):
            self._names[name] = first.setdefault(id(tensor), name)
        self._scope, self._unknown = "", 0
        self.answer = False
        """What code reads from a tensor on meta: whether a mask leaves anything out, for one."""
        self.has_read = False
        """It has read a number from one."""
        self.made_of: Hashable = None
        """The function that runs, and its arguments but for tensors."""
        self.draws: str | None = None
        """The first operator that drew random numbers; None: there is none."""

    def begin(self, model: nn.Module, received: Iterable[torch.Tensor] = ()) -> None:
        """Forget all tensors but those `received`; those of `model` are what they are before a forward.

        `model` is a copy of the unsplit one, or a stage of it.
        """
        # A tensor that an earlier forward has left somewhere is no tensor of this one. Held: no other one gets its address.
        self._past += self._contents.values()
        self._contents = {(key := storage_id(tensor)): self._contents[key] for tensor in received}
        self.reset(model)
        for name, tensor in _attributes(model):
            # Otherwise it is a parameter or buffer that an attribute names, too.
            if storage_id(tensor) not in self._contents:
                self._set(tensor, ("attribute", name))
        for name, value in self._inputs.items():
            if isinstance(value, torch.Tensor):
                self._set(value, ("input", name))

    def reset(self, model: nn.Module) -> None:
        """Let parameters and buffers of `model` be again what they were before its forward."""
        for name, tensor in own_tensors(model):
            self._set(tensor, ("tensor", self._names.get(name, name)))

    def names(self, model: nn.Module, tensors: set[int]) -> frozenset[str]:
        """Return the names in the unsplit model of those of `model` whose `id`s are among `tensors`."""
        return frozenset(self._names[name] for name, x in own_tensors(model) if id(x) in tensors)

    def enter(self, scope: str) -> None:
        """Begin a part of the forward: a block, or what the model's own code does after one."""
        self._scope, self._unknown = scope, 0

    def made_by(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func`, a function of torch; constants that it makes on meta are known by its arguments."""
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
        """Return the number of the expression that `tensor` is."""
        if storage_id(tensor) not in self._contents:  # no operator made it, such as the index in x[:, [0]]
            # On meta it has no value: it is known by the function that made it, or as the nth in its part.
            if tensor.is_meta:
                self._unknown += 1
                self._set(tensor, ("constant", self.made_of or self._scope, self._unknown))
            else:
                self._set(tensor, ("constant", str(tensor.tolist())))
        number = self._contents[storage_id(tensor)].number
        return self._number((number, *_geometry(tensor), tensor.storage_offset()))

    def of_all(self, tree: Any) -> tuple[Hashable, ...]:
        """Return the numbers of the tensors in `tree`, and what else is in it."""
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
        written = list(_written(func, args, kwargs))
        out = func(*args, **kwargs)
        for index, tensor in enumerate(written):
            self._set(tensor, (*expression, "written", index))
        for index, tensor in enumerate(x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            if storage_id(tensor) not in self._contents:  # else a view, or changed in place
                self._set(tensor, (*expression, index))
        return out

    def _set(self, tensor: torch.Tensor, expression: Hashable) -> None:
        self._contents[storage_id(tensor)] = _Content(tensor.untyped_storage(), self._number(expression))

    def _number(self, expression: Hashable) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))


class RunningFunction(TorchFunctionMode):
    """Tells `expressions` which function of torch runs: on meta, torch.tensor(2.0) does not say that it is 2."""

    def __init__(self, expressions: Expressions):
        super().__init__()
        self._expressions = expressions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._expressions.made_by(func, args, kwargs or {})


def own_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of `model` by each of their names."""
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
    """Return what tells constants apart: 1, 1.0 and True are three."""
    return (type(x).__name__, repr(x)) if isinstance(x, bool | int | float | complex) else str(x)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers; one of attention draws none if its dropout is 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    given = _by_name(func, args, kwargs)
    return given.get("dropout_p", given.get("p", 1.0)) != 0.0


def _written(func: Any, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors that an operator changes."""
    given = _by_name(func, args, kwargs)
    for argument in getattr(schema(func), "arguments", ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (x for x in tree_leaves(given.get(argument.name)) if isinstance(x, torch.Tensor))


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an operator by name, defaults included."""
    arguments = getattr(schema(func), "arguments", ())
    given = {x.name: x.default_value for x in arguments if x.has_default_value()}
    return given | {x.name: value for x, value in zip(arguments, args, strict=False)} | kwargs
