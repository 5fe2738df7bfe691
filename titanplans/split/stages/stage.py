"""A stage of a pipeline: the model's own forward over some of its blocks, the others passed through at their place.

Each stage runs the model's forward from the first line to the last. A block of another stage returns what it was given, in
the form of what it would return, or values that came from earlier stages. So positions, masks, scales and the numbers of
layers are the model's own matter, and no plan or stage repeats them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.split.decoder import Elsewhere
from titanplans.split.stages.trace import BlockCall, Value
from titanplans.torch_private.dispatch import tree_leaves, tree_unflatten
from titanplans.torch_private.modules import compiled_call, set_compiled_call

Values = dict[Value, torch.Tensor]


class Stage:
    """A stage of a pipeline: a model some of whose modules others hold, and what crosses its two borders.

    Args:
        model: in which a `PassedBlock` or a `PassedModule` stands for each of these.
        takes: what a forward takes from the stage before.
        gives: what it gives to the next stage; nothing: this is the last stage, which gives the model's output.
        received: where its stand-ins look for what was taken.
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
        self._passed = [module for module in model.modules() if isinstance(module, PassedModule)]
        self._made: Values = {}
        self._calls: dict[str, int] = {}
        """How often a module before the blocks has been called in the forward that runs."""

    def run(self, received: Sequence[torch.Tensor], forward: Callable[[], Any]) -> Any:
        """Call `forward`, a forward of the model, with what the stage before gave, in the order of `takes`.

        Returns:
            What the next stage takes, in the order of `gives`; of the last stage what `forward` returns.
        """
        self._received.update(zip(self.takes, received, strict=True))
        try:
            output = forward()
            made = self._received | self._made
            return tuple(made[value] for value in self.gives) if self.gives else output
        finally:
            self._received.clear()
            self._made.clear()
            self._calls.clear()
            for module in self._passed:
                module.calls = 0

    def watch(self) -> None:
        """Keep from here on the values that later stages need; call it once nothing will wrap a module any more."""
        for name in {value.module for value in self.gives}:
            module = self.model.get_submodule(name)
            if isinstance(module, Elsewhere):
                continue
            if (call := compiled_call(module)) is None:
                module.register_forward_hook(
                    lambda _module, _args, output, name=name: self._keep(name, output)
                )
            else:  # a hook would be part of the graph
                set_compiled_call(module, partial(self._call, name, call))

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        self._keep(name, output)
        return output

    def _keep(self, name: str, output: Any) -> None:
        """Keep the values of the module `name` that later stages need."""
        leaves, calls = tree_leaves(output), self._calls.get(name, 0)
        self._calls[name] = calls + 1
        for value in self.gives:
            if value.module == name and (value.block >= 0 or value.leaf == calls):
                self._made[value] = leaves[value.leaf if value.block >= 0 else 0]


class PassedBlock(Elsewhere):
    """Stands in the place of a block of another stage, and has its plain attributes, which the model's loop may read."""

    def __init__(self, block: nn.Module, call: BlockCall, received: Values):
        super().__init__()
        plain = {name: x for name, x in vars(block).items() if isinstance(x, bool | int | float | str | None)}
        self.__dict__.update({name: x for name, x in plain.items() if name not in self.__dict__})
        self._call, self._received = call, received

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [
            self._received[one.value]
            if one.value in self._received
            else (one.constant if one.given is None else _leaf(one.given, args, kwargs))
            for one in self._call.returned
        ]
        return tree_unflatten(leaves, self._call.structure)


def _leaf(at: int, args: Any, kwargs: Any) -> Any:
    """Return a leaf of the arguments of a block; of the first, mostly the hidden states, without a walk through all."""
    if at == 0 and args and isinstance(args[0], torch.Tensor):
        return args[0]
    return tree_leaves((args, kwargs))[at]


class PassedModule(Elsewhere):
    """Stands in the place of a module of another stage outside of blocks.

    It returns what the stage before gave, if this stage needs it. Otherwise nothing that this stage computes depends on what
    it returns: its input, or zeros.
    """

    def __init__(self, module: nn.Module, name: str, width: int | None, received: Values):
        """`width` is that of the zeros; None: the module keeps its input's shape, and this returns the input."""
        super().__init__()
        self.name, self.width, self.calls, self._received = name, width, 0, received
        self.is_received = False
        """The newest call returned what the stage before gave."""
        # Whose device code reads, and whose type masks get; nothing that has a value.
        self.weight = next(module.parameters()).detach().new_empty(0)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PassedModule":
        self.weight = fn(self.weight)
        return self

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Give zeros of `dtype`, as the embedding would under mixed precision; None: of the type of its parameters."""
        self.weight = self.weight if dtype is None else self.weight.to(dtype)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        value = Value(-1, self.name, self.calls)
        self.calls += 1
        self.is_received = value in self._received
        return self._received[value] if self.is_received else self.stand_in(x)

    def stand_in(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape that the module has for `x`, of all tokens."""
        if self.width is None:
            return x.detach()  # FSDP2 would warn of a view that has a gradient
        leading = x.shape[:-1] if x.is_floating_point() else x.shape
        return self.weight.new_zeros(*leading, self.width, device=x.device)
