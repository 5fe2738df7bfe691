"""A pipeline stage: the model's own forward over some of its blocks, with stand-ins for the modules of other stages.

Each stage runs the model's forward from the first line to the last. A stand-in for a block returns its arguments in the
structure of the block's results, or values that came from earlier stages. So the model's own code computes positions,
masks, scales and layer indices, and neither plan nor stage repeats that code.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.split.decoder import AbsentModule
from titanplans.split.stages.trace import BlockCall, Value
from titanplans.torch_private.dispatch import tree_leaves, tree_unflatten
from titanplans.torch_private.modules import compiled_call, set_compiled_call

Values = dict[Value, torch.Tensor]


class Stage:
    """A pipeline stage: a model in which stand-ins replace the modules of other stages.

    Args:
        model: the model, with a `StandInBlock` or `StandInModule` for each module of another stage.
        takes: the values that a forward takes from the previous stage.
        gives: the values that it gives to the next stage; (): this is the last stage, which returns the model's output.
        received: the values taken in the current forward; the stand-ins share this dict, and return them.
    """

    def __init__(
        self,
        model: nn.Module,
        takes: Sequence[Value],
        gives: Sequence[Value],
        received: Values,
    ):
        self.model, self.takes, self.gives = model, tuple(takes), tuple(gives)
        self._received = received
        self._stand_ins = [module for module in model.modules() if isinstance(module, StandInModule)]
        self._produced: Values = {}
        self._calls: dict[str, int] = {}
        """How often each module before the blocks has been called in the current forward."""

    def run(self, received: Sequence[torch.Tensor], forward: Callable[[], Any]) -> Any:
        """Call `forward`, a forward of the model, with the tensors of the previous stage, in the order of `takes`.

        Returns:
            The tensors for the next stage, in the order of `gives`; on the last stage the result of `forward`.
        """
        self._received.update(zip(self.takes, received, strict=True))
        try:
            output = forward()
            values = self._received | self._produced
            return tuple(values[value] for value in self.gives) if self.gives else output
        finally:
            self._received.clear()
            self._produced.clear()
            self._calls.clear()
            for module in self._stand_ins:
                module.calls = 0

    def watch(self) -> None:
        """From now on keep the values that later stages need; call it when no more wrappers will be added to modules."""
        for name in {value.module for value in self.gives}:
            module = self.model.get_submodule(name)
            if isinstance(module, AbsentModule):
                continue
            if (call := compiled_call(module)) is None:
                module.register_forward_hook(
                    lambda _module, _args, output, name=name: self._keep(name, output)
                )
            else:  # a hook would become part of the compiled graph
                set_compiled_call(module, partial(self._call, name, call))

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        self._keep(name, output)
        return output

    def _keep(self, name: str, output: Any) -> None:
        """Keep those values of the module `name` that later stages need."""
        leaves, calls = tree_leaves(output), self._calls.get(name, 0)
        self._calls[name] = calls + 1
        for value in self.gives:
            if value.module == name and (value.block >= 0 or value.leaf == calls):
                self._produced[value] = leaves[value.leaf if value.block >= 0 else 0]


class StandInBlock(AbsentModule):
    """Stands in for a block of another stage; it has the block's plain attributes, which the model's loop may use."""

    def __init__(self, block: nn.Module, call: BlockCall, received: Values):
        super().__init__()
        plain = {name: x for name, x in vars(block).items() if isinstance(x, bool | int | float | str | None)}
        self.__dict__.update({name: x for name, x in plain.items() if name not in self.__dict__})
        self._call, self._received = call, received

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [
            self._received[result.value]
            if result.value in self._received
            else (result.constant if result.argument is None else _leaf(result.argument, args, kwargs))
            for result in self._call.returned
        ]
        return tree_unflatten(leaves, self._call.structure)


def _leaf(index: int, args: Any, kwargs: Any) -> Any:
    """Return the leaf at `index` of a block's arguments; the first leaf, usually the hidden states, without flattening."""
    if index == 0 and args and isinstance(args[0], torch.Tensor):
        return args[0]
    return tree_leaves((args, kwargs))[index]


class StandInModule(AbsentModule):
    """Stands in for a module of another stage that is outside of the blocks.

    If this stage needs the module's output, the stand-in returns the tensor that the previous stage sent. Otherwise it
    returns its input, or zeros, and no result of this stage depends on them.
    """

    def __init__(self, module: nn.Module, name: str, width: int | None, received: Values):
        """`width`: the last dimension of the zeros; None: the module keeps its input's shape, so the input is returned."""
        super().__init__()
        self.name, self.width, self.calls, self._received = name, width, 0, received
        self.is_received = False
        """The latest call returned a tensor from the previous stage."""
        # Some code reads the device of the embedding's weight, or its dtype for masks. This weight has no values.
        self.weight = next(module.parameters()).detach().new_empty(0)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "StandInModule":
        self.weight = fn(self.weight)
        return self

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Return zeros of `dtype` from now on, as the embedding would in mixed precision; None: its parameters' dtype."""
        self.weight = self.weight if dtype is None else self.weight.to(dtype)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        value = Value(-1, self.name, self.calls)
        self.calls += 1
        self.is_received = value in self._received
        return self._received[value] if self.is_received else self.stand_in(x)

    def stand_in(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of all tokens with the shape that the module's output has for `x`."""
        if self.width is None:
            return x.detach()  # FSDP2 would warn about a view that has a gradient
        leading = x.shape[:-1] if x.is_floating_point() else x.shape
        return self.weight.new_zeros(*leading, self.width, device=x.device)
