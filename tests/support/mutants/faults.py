"""Styles with one fault each, made from a right one: a copy that does all else as before.

A fault is a subclass of the right style's class, made at run time, so that strict application sees the
kind of style that it was.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.faulty_styles import Install, installed, leaving, subclassed
from titanplans.split.border import Border
from titanplans.split.layout import Layout, StreamLayout, shard_size
from titanplans.split.module_weight import local_specs
from titanplans.styles.base import SplitOver, Style
from titanplans.styles.rowwise import Rowwise
from titanplans.styles.vocab_embedding import VocabEmbedding


def on_stream(style: Style, stream: StreamLayout) -> Style:
    """`style`, made for another stream than the rest of its plan."""
    base = type(style).layout

    def layout(self: Style, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return base(self, name, param, over._replace(stream=stream))

    def install(right: Install, module: nn.Module, border: Border) -> None:
        other = Border(border.meshes, stream)
        other.stream.is_running = True  # no forward starts it
        right(module, other)

    return installed(subclassed(style, "OnOtherStream", layout=layout), install)


def with_option(style: Style, **options: Any) -> Style:
    """`style` with other arguments."""
    other = copy.copy(style)
    vars(other).update(options)
    return other


# Gradients of replicated parameters.


def unreduced(style: Style) -> Style:
    """A Partial gradient of a replicated parameter is taken for a whole one."""
    return _relabelled(style, "Unreduced", Partial(), Replicate())


def summed_again(style: Style) -> Style:
    """A whole gradient of a replicated parameter is taken for a Partial one."""
    return _relabelled(style, "SummedAgain", Replicate(), Partial())


def _relabelled(style: Style, name: str, old: Any, new: Any) -> Style:
    base = type(style).layout

    def layout(self: Style, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        right = base(self, name, param, over)
        return right._replace(gradient=new) if right is not None and right.gradient == old else right

    return subclassed(style, name, layout=layout)


def with_rows(style: Style, change: Any) -> Style:
    """Each rank reads other rows: `change` of the right ones."""
    base = type(style).layout

    def layout(self: Style, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        right = base(self, name, param, over)
        return right if right is None or right.rows is None else right._replace(rows=change(right.rows))

    return subclassed(style, "OtherRows", layout=layout)


# Borders of regions.


class _Unsummed(Border):
    """The forward is right; in the backward each rank keeps its own share of the gradient."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.stream.dim is None:
            return x
        return _GatherUnsummed.apply(x, super().enter(x.detach()), self.stream.dim, self.rank, self.group[1])

    def enter_full(self, x: torch.Tensor) -> torch.Tensor:
        return x

    enter_in_high_precision = enter


class _GatherUnsummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, whole, dim, rank, ranks):
        ctx.dim, ctx.rank, ctx.ranks = dim, rank, ranks
        return whole

    @staticmethod
    def backward(ctx: Any, grad):
        size = shard_size(grad.shape[ctx.dim], ctx.ranks)
        missing = size * ctx.ranks - grad.shape[ctx.dim]
        shape = [*grad.shape[: ctx.dim], missing, *grad.shape[ctx.dim + 1 :]]
        padded = torch.cat([grad, grad.new_zeros(shape)], ctx.dim)
        return padded.narrow(ctx.dim, ctx.rank * size, size).contiguous(), None, None, None, None


class _Doubled(Border):
    """The forward is right; in the backward the whole gradient is summed once more."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return super().enter(scale_gradient(x, self.group[1]))

    def enter_full(self, x: torch.Tensor) -> torch.Tensor:
        return super().enter_full(scale_gradient(x, self.group[1]))

    enter_in_high_precision = enter


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `x`; its gradient is multiplied by `factor`."""
    return _Scale.apply(x, factor)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad):
        return grad * ctx.factor, None


def entry_unsummed(style: Style) -> Style:
    """The gradient of a region's input, or of the head's, is not summed over the ranks."""
    return _at_border(style, _Unsummed)


def entry_summed_again(style: Style) -> Style:
    """The gradient of a region's input, or of the head's, is summed twice."""
    return _at_border(style, _Doubled)


def _at_border(style: Style, kind: type[Border]) -> Style:
    def install(right: Install, module: nn.Module, border: Border) -> None:
        other = copy.copy(border)
        other.__class__ = kind
        right(module, other)

    return installed(style, install)


# Values.


def bias_on_every_rank(style: Rowwise) -> Style:
    """The bias is part of each rank's product, and so counted once for each rank."""

    def layout(self: Rowwise, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        right = Rowwise.layout(self, name, param, over)
        return None if right is None else right._replace(deferred=False)

    return subclassed(style, "BiasOnEveryRank", layout=layout)


def bias_forgotten(style: Rowwise) -> Style:
    """The bias is kept out of each rank's product, and not added to the sum."""
    return leaving(style, lambda border, module, output: border.leave(output))


def shifted(style: Style, rows: int) -> Style:
    """The shards begin `rows` further on: what a rank holds is not what its place says."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        right(module, border)
        for param in module._parameters.values():
            if isinstance(param, DTensor) and isinstance(placement := param.placements[0], Shard):
                whole = param.detach().full_tensor().roll(rows, placement.dim)
                with torch.no_grad():
                    param.to_local().copy_(distribute_tensor(whole, border.mesh, [placement]).to_local())

    return installed(style, install, f"ShiftedBy{rows}")


def other_head(style: Style) -> Style:
    """Ranks that share key/value heads read another head than theirs."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        right(module, border)
        specs = local_specs(module)
        for name, spec in specs.items():
            if spec.layout.rows is not None:
                other = (spec.rank + spec.layout.rows.runs[0].ranks_per_slice) % border.mesh.size()
                specs[name] = spec._replace(rank=other)

    return installed(style, install, "OtherHead")


def offset_by_local_rows(style: VocabEmbedding) -> Style:
    """A rank computes its first token as rank x its own number of rows, which is smaller on the last rank."""

    def offset(module: nn.Module, border: Border) -> int:
        weight = module._parameters["weight"]
        local = weight.to_local()  # type: ignore[union-attr]
        return border.rank * (shard_size(len(weight), border.group[1]) - len(local))  # type: ignore[arg-type]

    return _offset(style, offset)


def offset_by_one(style: VocabEmbedding) -> Style:
    """Each rank takes its first token to be one further on than it is."""
    return _offset(style, lambda module, border: -1)


def _offset(style: VocabEmbedding, offset: Any) -> Style:
    def install(right: Install, module: nn.Module, border: Border) -> None:
        right(module, border)
        by, tokens = offset(module, border), len(module._parameters["weight"])  # type: ignore[arg-type]
        module.register_forward_pre_hook(lambda module, args: ((args[0] + by) % tokens, *args[1:]))

    return installed(style, install)


def untied(style: Style) -> Style:
    """The parameters are distributed without a look at what other modules hold."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        for name, param in module._parameters.items():
            module._parameters[name] = None if param is None else nn.Parameter(param.detach().clone())
        right(module, border)

    return installed(style, install, "Untied")
