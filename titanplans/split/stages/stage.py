"""A stage of a pipeline: the model's own forward over some of its blocks, the others passed through at their place.

Each stage runs the model's whole forward. A block of another stage returns what it was given, in the form of what it would
return, or values that came from earlier stages. So positions, masks, scales and the numbers of layers are the model's own
matter, and no plan or stage repeats them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.plan.decoder import Elsewhere
from titanplans.split.stages.trace import BlockCall, Value
from titanplans.torch_private.dispatch import tree_leaves, tree_unflatten
from titanplans.torch_private.modules import compiled_call, set_compiled_call

Values = dict[Value, torch.Tensor]


class Stage:
    """A stage of a pipeline: a model some of whose modules others hold, and what crosses its two borders.

    Args:
        model: in which a `PassedBlock` or a `PassedModule` stands for each of these.
        names: of all blocks.
        takes: what a forward takes from the stage before.
        gives: what it gives to the stage behind; nothing: this is the last stage, which gives the model's output.
        received: where its `PassedBlock`s look for what was taken.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        takes: Sequence[Value],
        gives: Sequence[Value],
        received: Values,
    ):
        self.model, self.takes, self.gives = model, tuple(takes), tuple(gives)
        self._names, self._received = names, received
        self._made: Values = {}

    def run(self, received: Sequence[torch.Tensor], forward: Callable[[], Any]) -> Any:
        """Call `forward`, a forward of the model, with what the stage before gave, in the order of `takes`.

        Returns:
            What the stage behind takes, in the order of `gives`; of the last stage what `forward` returns.
        """
        self._received.update(zip(self.takes, received, strict=True))
        try:
            output = forward()
            made = self._received | self._made
            return tuple(made[value] for value in self.gives) if self.gives else output
        finally:
            self._received.clear()
            self._made.clear()

    def watch(self) -> None:
        """Keep from here on what blocks give that later stages need; call it once nothing will wrap a block any more."""
        for at in {value.block for value in self.gives}:
            block = self.model.get_submodule(self._names[at])
            if isinstance(block, PassedBlock):
                continue
            if (call := compiled_call(block)) is None:
                block.register_forward_hook(lambda _block, _args, output, at=at: self._keep(at, output))
            else:  # a hook would be part of the graph
                set_compiled_call(block, partial(self._call, at, call))

    def _call(self, at: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        self._keep(at, output)
        return output

    def _keep(self, at: int, output: Any) -> None:
        """Keep the values of the block with the number `at` that later stages need."""
        leaves = tree_leaves(output)
        self._made |= {value: leaves[value.leaf] for value in self.gives if value.block == at}


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
    """Stands in the place of a module of another stage outside of blocks: an embedding gives zeros, others their input."""

    def __init__(self, module: nn.Module):
        super().__init__()
        weight = next(module.parameters())
        self.width = weight.shape[-1] if isinstance(module, nn.Embedding) else None
        # Whose device code reads, and whose type masks get; nothing that has a value.
        self.weight = weight.detach().new_empty(0)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PassedModule":
        self.weight = fn(self.weight)
        return self

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Give zeros of `dtype`, as the embedding would under mixed precision; None: of the type of its parameters."""
        self.weight = self.weight if dtype is None else self.weight.to(dtype)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # No other stage's part of the forward counts here; FSDP2 would warn of a view that has a gradient.
        return (
            x.detach() if self.width is None else self.weight.new_zeros(*x.shape, self.width, device=x.device)
        )
