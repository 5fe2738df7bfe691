"""The collectives that a split model needs for a call of a module with a style, and no more.

A style returns them (`Style.sends`); `titanplans.observe` compares them with those that a step issues.
"""

import math
from typing import NamedTuple

import torch


class ExpectedCollective(NamedTuple):
    """A collective of the forward, and that of its backward."""

    forward: tuple[str, ...]
    """The operation, or alternatives to it; () for none."""
    backward: tuple[str, ...]
    elements: int
    """Of the full tensor, at most."""


class Call(NamedTuple):
    """A call of a module of a split model."""

    shapes: tuple[torch.Size, ...]
    """Shapes of this rank's tensors, the input first."""
    dim: int | None
    """The dimension in which the input is a shard of the sequence; None if it is full."""
    degree: int
    exchanged_rows: int = 0
    """Rows, over all ranks, of this product's all-to-all of tokens for heads, in or out; 0 if there is none."""

    @property
    def tokens(self) -> int:
        """Return the tokens of the full input [..., width]."""
        return math.prod(self.shapes[0][:-1]) * (1 if self.dim is None else self.degree)

    @property
    def elements(self) -> int:
        """Return the elements of the full input."""
        return self.tokens * self.shapes[0][-1]


def cost_of_enter(call: Call) -> ExpectedCollective:
    """Return what `Border.enter` sends for the input of `call`."""
    if call.dim is None:
        return ExpectedCollective((), ("all_reduce",), call.elements)
    return ExpectedCollective(("all_gather",), ("reduce_scatter",), call.elements)


def cost_of_leave(call: Call) -> ExpectedCollective:
    """Return what `Border.leave` sends for an output that is as large as the input of `call`."""
    if call.dim is None:
        return ExpectedCollective(("all_reduce",), (), call.elements)
    return ExpectedCollective(("reduce_scatter",), ("all_gather",), call.elements)


def cost_of_sum(elements: int) -> ExpectedCollective:
    """Return what `sum_in_region` sends."""
    return ExpectedCollective(("all_reduce",), ("all_reduce",), elements)


def cost_of_gather(elements: int) -> ExpectedCollective:
    """Return what `gather` sends."""
    return ExpectedCollective(("all_gather",), ("reduce_scatter",), elements)


def exchanged_elements(call: Call) -> int:
    """Return the elements of the all-to-all of tokens for heads at the input or the output of a product."""
    return call.tokens * call.exchanged_rows
