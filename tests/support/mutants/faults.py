"""Styles with one fault each, made from a correct style.

Each fault is a subclass of the correct style's class, made at run time. So the plan's checks, which look at the class of a
style, accept it.
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
    """Return `style` with activations and gradients laid out for `stream` instead of the plan's stream."""
    base = type(style).layout

    def layout(self: Style, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return base(self, name, param, over._replace(stream=stream))

    def install(original: Install, module: nn.Module, border: Border) -> None:
        other = Border(border.meshes, stream)
        other.stream.is_running = True  # no hook of the model starts this second stream
        original(module, other)

    return installed(subclassed(style, "OnOtherStream", layout=layout), install)


def with_option(style: Style, **options: Any) -> Style:
    """Return a copy of `style` with some arguments changed."""
    other = copy.copy(style)
    vars(other).update(options)
    return other


# Gradients of replicated parameters.


def unreduced(style: Style) -> Style:
    """Label the Partial gradient of a replicated parameter as Replicate."""
    return _relabelled(style, "Unreduced", Partial(), Replicate())


def summed_again(style: Style) -> Style:
    """Label the replicated gradient of a replicated parameter as Partial, so that it is summed once more."""
    return _relabelled(style, "SummedAgain", Replicate(), Partial())


def _relabelled(style: Style, name: str, old: Any, new: Any) -> Style:
    base = type(style).layout

    def layout(self: Style, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        original = base(self, name, param, over)
        return (
            original._replace(gradient=new) if original is not None and original.gradient == old else original
        )

    return subclassed(style, name, layout=layout)


def with_rows(style: Style, change: Any) -> Style:
    """Let each rank store `change(rows)` instead of the correct rows."""
    base = type(style).layout

    def layout(self: Style, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        original = base(self, name, param, over)
        return (
            original
            if original is None or original.rows is None
            else original._replace(rows=change(original.rows))
        )

    return subclassed(style, "OtherRows", layout=layout)


# Borders of regions.


class _Unsummed(Border):
    """The forward is correct. In the backward each rank slices its own gradient, and gradients are not summed over ranks."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.stream.dim is None:
            return x
        return _GatherUnsummed.apply(x, super().enter(x.detach()), self.stream.dim, self.rank, self.group[1])

    def enter_full(self, x: torch.Tensor) -> torch.Tensor:
        return x

    enter_in_high_precision = enter


class _GatherUnsummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, gathered, dim, rank, ranks):
        ctx.dim, ctx.rank, ctx.ranks = dim, rank, ranks
        return gathered

    @staticmethod
    def backward(ctx: Any, grad):
        size = shard_size(grad.shape[ctx.dim], ctx.ranks)
        missing = size * ctx.ranks - grad.shape[ctx.dim]
        shape = [*grad.shape[: ctx.dim], missing, *grad.shape[ctx.dim + 1 :]]
        padded = torch.cat([grad, grad.new_zeros(shape)], ctx.dim)
        return padded.narrow(ctx.dim, ctx.rank * size, size).contiguous(), None, None, None, None


class _Doubled(Border):
    """The forward is correct; in the backward the gradient is scaled by the number of ranks, as if summed twice."""

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
    """Do not sum the gradient of the input of a region, or of the head, over the ranks."""
    return _at_border(style, _Unsummed)


def entry_summed_again(style: Style) -> Style:
    """Sum the gradient of the input of a region, or of the head, twice."""
    return _at_border(style, _Doubled)


def _at_border(style: Style, kind: type[Border]) -> Style:
    def install(original: Install, module: nn.Module, border: Border) -> None:
        other = copy.copy(border)
        other.__class__ = kind
        original(module, other)

    return installed(style, install)


# Values.


def bias_on_every_rank(style: Rowwise) -> Style:
    """Add the bias to each rank's product, so that the sum over ranks contains the bias once for each rank."""

    def layout(self: Rowwise, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        original = Rowwise.layout(self, name, param, over)
        return None if original is None else original._replace(deferred=False)

    return subclassed(style, "BiasOnEveryRank", layout=layout)


def bias_forgotten(style: Rowwise) -> Style:
    """Leave the bias out of each rank's product, and do not add it to the sum."""
    return leaving(style, lambda border, module, output: border.leave(output))


def shifted(style: Style, rows: int) -> Style:
    """Shift the shards by `rows`, so that each shard has the values of another position."""

    def install(original: Install, module: nn.Module, border: Border) -> None:
        original(module, border)
        for param in module._parameters.values():
            if isinstance(param, DTensor) and isinstance(placement := param.placements[0], Shard):
                full = param.detach().full_tensor().roll(rows, placement.dim)
                with torch.no_grad():
                    param.to_local().copy_(distribute_tensor(full, border.mesh, [placement]).to_local())

    return installed(style, install, f"ShiftedBy{rows}")


def other_head(style: Style) -> Style:
    """Let ranks that share a key/value head use another head than the one that belongs to them."""

    def install(original: Install, module: nn.Module, border: Border) -> None:
        original(module, border)
        specs = local_specs(module)
        for name, spec in specs.items():
            if spec.layout.rows is not None:
                other = (spec.rank + spec.layout.rows.runs[0].ranks_per_slice) % border.mesh.size()
                specs[name] = spec._replace(rank=other)

    return installed(style, install, "OtherHead")


def offset_by_local_rows(style: VocabEmbedding) -> Style:
    """Compute a rank's first token as rank x the rank's number of rows, which is smaller on the last rank."""

    def offset(module: nn.Module, border: Border) -> int:
        weight = module._parameters["weight"]
        local = weight.to_local()  # type: ignore[union-attr]
        return border.rank * (shard_size(len(weight), border.group[1]) - len(local))  # type: ignore[arg-type]

    return _offset(style, offset)


def offset_by_one(style: VocabEmbedding) -> Style:
    """Add one to the first token of each rank's shard."""
    return _offset(style, lambda module, border: -1)


def _offset(style: VocabEmbedding, offset: Any) -> Style:
    def install(original: Install, module: nn.Module, border: Border) -> None:
        original(module, border)
        by, tokens = offset(module, border), len(module._parameters["weight"])  # type: ignore[arg-type]
        module.register_forward_pre_hook(lambda module, args: ((args[0] + by) % tokens, *args[1:]))

    return installed(style, install)


def untied(style: Style) -> Style:
    """Distribute the parameters without regard to other modules that are tied to them."""

    def install(original: Install, module: nn.Module, border: Border) -> None:
        for name, param in module._parameters.items():
            module._parameters[name] = None if param is None else nn.Parameter(param.detach().clone())
        original(module, border)

    return installed(style, install, "Untied")
