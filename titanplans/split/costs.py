"""The fewest collectives that a call of a module with a style needs.

A style returns these collectives (`Style.sends`), and `titanplans.observe` compares them with the collectives of a
step.
"""

import math
from typing import NamedTuple

import torch


class ExpectedCollective(NamedTuple):
    """A collective of the forward, and the collective of its backward."""

    forward: tuple[str, ...]
    """Names of operations, any one of which is expected. (): no collective is expected."""
    backward: tuple[str, ...]
    elements: int
    """The largest possible number of elements of the full tensor."""


class Call(NamedTuple):
    """One call of a module of a split model."""

    shapes: tuple[torch.Size, ...]
    """Shapes of this rank's tensor arguments, the input first."""
    dim: int | None
    """The sequence dimension, if the input is sharded along it; None if the input is full."""
    degree: int
    exchanged_rows: int = 0
    """Number of rows of the weight that an all-to-all exchanges at this projection's input or output, over all ranks; 0:
    there is no all-to-all."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the full input [..., width]."""
        return math.prod(self.shapes[0][:-1]) * (1 if self.dim is None else self.degree)

    @property
    def elements(self) -> int:
        """Number of elements of the full input."""
        return self.tokens * self.shapes[0][-1]


def cost_of_enter(call: Call) -> ExpectedCollective:
    """Return the collectives of `Border.enter` for the input of `call`."""
    if call.dim is None:
        return ExpectedCollective((), ("all_reduce",), call.elements)
    return ExpectedCollective(("all_gather",), ("reduce_scatter",), call.elements)


def cost_of_leave(call: Call) -> ExpectedCollective:
    """Return the collectives of `Border.leave` for an output as large as the input of `call`."""
    if call.dim is None:
        return ExpectedCollective(("all_reduce",), (), call.elements)
    return ExpectedCollective(("reduce_scatter",), ("all_gather",), call.elements)


def cost_of_sum(elements: int) -> ExpectedCollective:
    """Return the collectives of `sum_in_region`."""
    return ExpectedCollective(("all_reduce",), ("all_reduce",), elements)


def cost_of_gather(elements: int) -> ExpectedCollective:
    """Return the collectives of `gather`."""
    return ExpectedCollective(("all_gather",), ("reduce_scatter",), elements)


def exchanged_elements(call: Call) -> int:
    """Return the number of elements in a projection's all-to-all, which exchanges tokens for heads or the reverse."""
    return call.tokens * call.exchanged_rows
