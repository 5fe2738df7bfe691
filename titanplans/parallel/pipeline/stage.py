"""A stage of a pipeline: the model's own forward over some of its blocks, the others passed through at their place.

Each stage runs the model's whole forward. A block of another stage returns what it was given, in the form of what it would
return, or values that came from earlier stages. So positions, masks, scales and the numbers of layers are the model's own
matter, and no plan or stage repeats them.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.errors import ParallelError
from titanplans.parallel.pipeline.trace import BlockCall, Trace, Value
from titanplans.plan.decoder import Decoder
from titanplans.text import class_name
from titanplans.torch_private.dispatch import tree_leaves, tree_unflatten

Values = dict[Value, torch.Tensor]


class Stage(nn.Module):
    """The blocks `first` to `last`, the latter not included, of `model`, which becomes this stage in place.

    Its forward takes the values that the stage before gives, in the order of `takes`, and the model's inputs by keyword;
    it returns what the next stage takes, in the order of `gives`, or the model's output.

    Args:
        model: the whole model, not yet split; on meta, too.
        decoder: its.
        trace: of a forward of it.

    Raises:
        ParallelError: it has no block, or one that the model does not have.
    """

    def __init__(self, model: nn.Module, decoder: Decoder, trace: Trace, first: int, last: int):
        super().__init__()
        number = len(decoder.names)
        if not 0 <= first < last <= number:
            raise ParallelError(
                f"blocks {first} to {last} of {class_name(model)}, which has {number}: a stage has one block or more"
            )
        self.takes, self.gives = trace.crossing(first), () if last == number else trace.crossing(last)
        self._received: Values = {}
        self._made: Values = {}
        for at, name in enumerate(decoder.names):
            block = model.get_submodule(name)
            if first <= at < last:
                block.register_forward_hook(partial(self._keep, at))
            else:
                model.set_submodule(name, PassedBlock(block, trace.calls[at], self._received))
        for name, call in trace.outside.items():
            module = model.get_submodule(name)
            elsewhere = (call.last == 0 and first > 0) or (call.first == number and last < number)
            # What takes others' place has their input's shape. The rest stays, with parameters that several stages hold.
            if elsewhere and (call.keeps_shape or name == decoder.head or isinstance(module, nn.Embedding)):
                model.set_submodule(name, PassedModule(module))
        self.model = model

    def forward(self, *received: torch.Tensor, **inputs: Any) -> Any:
        self._received.update(zip(self.takes, received, strict=True))
        try:
            output = self.model(**inputs)
            made = self._received | self._made
            return tuple(made[value] for value in self.gives) if self.gives else output
        finally:
            self._received.clear()
            self._made.clear()

    def _keep(self, at: int, block: nn.Module, args: Any, output: Any) -> None:
        """Keep the values of the block with the number `at` that later stages need."""
        leaves = tree_leaves(output)
        self._made |= {value: leaves[value.leaf] for value in self.gives if value.block == at}


class PassedBlock(nn.Module):
    """Stands in the place of a block of another stage, and has its plain attributes, which the model's loop may read."""

    def __init__(self, block: nn.Module, call: BlockCall, received: Values):
        super().__init__()
        plain = {name: x for name, x in vars(block).items() if isinstance(x, bool | int | float | str | None)}
        self.__dict__.update({name: x for name, x in plain.items() if name not in self.__dict__})
        self._call, self._received = call, received

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = tree_leaves((args, kwargs))
        leaves = [
            self._received[one.value]
            if one.value in self._received
            else (one.constant if one.given is None else given[one.given])
            for one in self._call.returned
        ]
        return tree_unflatten(leaves, self._call.structure)


class PassedModule(nn.Module):
    """Stands in the place of a module of another stage outside of blocks: an embedding gives zeros, others their input."""

    def __init__(self, module: nn.Module):
        super().__init__()
        weight = next(module.parameters())
        self.width = weight.shape[-1] if isinstance(module, nn.Embedding) else None
        self.register_buffer(
            "weight", weight.detach().new_empty(0), persistent=False
        )  # whose device code reads

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x if self.width is None else self.weight.new_zeros(*x.shape, self.width)
