"""Styles with one fault each, made from a right one: a copy that does all else as before.

A fault is a subclass of the right style's class, made at run time, so that strict application sees the
kind of style that it was.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.plan.layout import Layout, shard_size
from titanplans.plan.styles.base import Style
from titanplans.plan.styles.projections import Rowwise
from titanplans.plan.styles.region import Region
from titanplans.plan.styles.vocab import VocabEmbedding, VocabHead
from titanplans.split.parameters.local_parameters import ParameterMemo, local_parameter
from titanplans.split.stream import Border, Stream


def _faulty(style: Style, name: str, **methods: Any) -> Style:
    """Return a copy of `style` with other methods; the first argument of each is the copy."""
    fault = copy.copy(style)
    fault.__class__ = type(name, (type(style),), methods)
    return fault


def on_stream(style: Any, stream: Stream) -> Style:
    """`style`, made for another stream than the rest of its plan."""
    other = copy.copy(style)
    other.stream = stream
    return other


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

    def layout(self: Style, name: str, param: nn.Parameter) -> Layout | None:
        right = base(self, name, param)
        return right._replace(gradient=new) if right is not None and right.gradient == old else right

    return _faulty(style, name, layout=layout)


def with_rows(style: Style, change: Any) -> Style:
    """Each rank reads other rows: `change` of the right ones."""
    base = type(style).layout

    def layout(self: Style, name: str, param: nn.Parameter) -> Layout | None:
        right = base(self, name, param)
        return right if right is None or right.rows is None else right._replace(rows=change(right.rows))

    return _faulty(style, "OtherRows", layout=layout)


# Borders of regions.


class _Unsummed(Border):
    """Enters as ever; backwards each rank goes on with its own share of the gradient."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.stream.dim is None:
            return x
        return _GatherUnsummed.apply(x, super().enter(x.detach()), self.stream.dim, self.rank, self.group[1])


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
    """Enters as ever; backwards the gradient is summed again after it is whole."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return super().enter(scale_gradient(x, self.group[1]))


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `x`, whose gradient comes back `factor` times as large."""
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
    return _other_border(style, "EntryUnsummed", _Unsummed)


def entry_summed_again(style: Style) -> Style:
    """The gradient of a region's input, or of the head's, is summed twice."""
    return _other_border(style, "EntrySummedAgain", _Doubled)


def _other_border(style: Style, name: str, kind: type[Border]) -> Style:
    def enter(self: Region, border: Border, module, args, kwargs):
        return Region._enter(self, kind(self.mesh, border.stream), module, args, kwargs)  # type: ignore[attr-defined]

    def install_region(self: Region, module: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh  # type: ignore[attr-defined]
        Region.install(self, module, mesh)

    def install_head(self: VocabHead, module: nn.Module, mesh: DeviceMesh) -> None:
        border = kind(mesh, self.stream)
        module.register_forward_pre_hook(lambda module, args: (border.enter(args[0]), *args[1:]))
        vocabulary = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
        module.register_forward_hook(partial(self._logits, border, vocabulary))

    if isinstance(style, Region):
        return _faulty(style, name, _enter=enter, install=install_region)
    return _faulty(style, name, install=install_head)


# Values.


def bias_on_every_rank(style: Rowwise) -> Style:
    """The bias is part of each rank's product, and so counted once for each rank."""

    def layout(self: Rowwise, name: str, param: nn.Parameter) -> Layout | None:
        right = Rowwise.layout(self, name, param)
        return None if right is None else right._replace(hidden=False)

    def leave(self: Rowwise, border: Border, module, args, output):
        return border.leave(output)

    return _faulty(style, "BiasOnEveryRank", layout=layout, _leave=leave)


def bias_forgotten(style: Rowwise) -> Style:
    """The bias is kept out of each rank's product, and not added to the sum."""
    return _faulty(
        style, "BiasForgotten", _leave=lambda self, border, module, args, output: border.leave(output)
    )


def shifted(style: Style, rows: int) -> Style:
    """The shards begin `rows` further on: what a rank holds is not what its place says."""

    def apply(self: Style, module: nn.Module, mesh: DeviceMesh, layouts: Any, memo: ParameterMemo) -> None:
        for name, layout in layouts.items():
            if isinstance(layout.placement, Shard):
                param = module._parameters[name]
                param.data = param.data.roll(rows, layout.placement.dim)  # type: ignore[union-attr]
        type(style).apply(self, module, mesh, layouts, memo)

    return _faulty(style, f"ShiftedBy{rows}", apply=apply)


def other_head(style: Style) -> Style:
    """Ranks that share key/value heads read another head than theirs."""

    def apply(self: Style, module: nn.Module, mesh: DeviceMesh, layouts: Any, memo: ParameterMemo) -> None:
        type(style).apply(self, module, mesh, layouts, memo)
        for name, reading in module.__dict__["_tp_readings"].items():
            if reading.layout.rows is not None:
                other = (reading.rank + reading.layout.rows.runs[0].sharing) % mesh.size()
                module.__dict__["_tp_readings"][name] = reading._replace(rank=other)

    return _faulty(style, "OtherHead", apply=apply)


def offset_by_local_rows(style: VocabEmbedding) -> Style:
    """Each rank's first token is its number times the rows that it holds, of which the last holds fewer."""

    def install(self: VocabEmbedding, module: nn.Module, mesh: DeviceMesh) -> None:
        VocabEmbedding.install(self, module, mesh)
        _, *others = module.__dict__["_tp_rows"]
        module.__dict__["_tp_rows"] = local_parameter(module, "weight").shape[0], *others  # type: ignore[union-attr]

    return _faulty(style, "OffsetByLocalRows", install=install)


def offset_by_one(style: VocabEmbedding) -> Style:
    """Each rank takes its first token to be one further on than it is."""

    def install(self: VocabEmbedding, module: nn.Module, mesh: DeviceMesh) -> None:
        module.register_forward_pre_hook(lambda module, args: (args[0] - 1, *args[1:]))
        VocabEmbedding.install(self, module, mesh)

    return _faulty(style, "OffsetByOne", install=install)


def untied(style: Style) -> Style:
    """The parameters are distributed without a look at what other modules hold."""

    def apply(self: Style, module: nn.Module, mesh: DeviceMesh, layouts: Any, memo: ParameterMemo) -> None:
        type(style).apply(self, module, mesh, layouts, ParameterMemo())

    return _faulty(style, "Untied", apply=apply)
