"""The scale of a block's, a mixer's or an MLP's output, by a fit over all of its elements; in 16 bits.

There rounding alone makes two tensors differ by a hundredth and more, and hides an output that is a tenth too large. But
roundings point in all directions, and a wrong scale in one: that of the tensor. So with d = split - whole

    slope = <d, whole> / <whole, whole>

is the slope, less 1, of a regression of the split tensor on the whole one. It is compared for the outputs of blocks,
mixers and MLPs, whose layout is known, and for the gradients of these outputs.

Its unit is the root mean square of the slope in the whole model's perturbed runs, which does not grow with their number. A
slope is one number, and near 0 in a few runs by chance. So the unit is at least the tensor's whole difference in these
runs times the share of a difference that lies in the tensor's direction, both as root mean squares, the share over all
such tensors of the training.

Gradients share a rounding: that of the loss's gradient at the labels, nearly one number at all of them. Perturbed weights
hardly move that number over an edge, and another order of its factors does. So there the unit is at least one rounding.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from titanplans.proof.compare.assemble import candidates, of_two_cuts
from titanplans.proof.compare.record import Recorder, module_name
from titanplans.split.decoder import find_decoder

K = TypeVar("K")

SCALE = "scale"
"""The kind of these quantities."""


class Regression(NamedTuple):
    """A fit of a tensor to the expected one."""

    slope: float
    apart: float
    """The root mean square of their difference, relative to that of the expected tensor."""


def watched(model: nn.Module) -> frozenset[str]:
    """Return the names of the blocks of `model`, their mixers and their MLPs."""
    decoder = find_decoder(model, required=False)
    return frozenset((*decoder.names, *decoder.mixers, *decoder.mlps))


def recorded(record: Recorder, names: Collection[str]) -> dict[tuple[str, str], torch.Tensor]:
    """Return as quantities the recorded outputs of the modules `names`, and after the backward their gradients."""
    return {(SCALE, key): record.tensors[key] for key in sorted(record.tensors) if module_name(key) in names}


def fit(value: torch.Tensor, expected: torch.Tensor) -> Regression | None:
    """Return the fit of `value`; None if a tensor is all zeros, or the shapes differ."""
    if value.shape != expected.shape:
        return None
    whole = expected.double()
    apart, size = value.double() - whole, whole.square().sum()
    if not size:
        return None
    return Regression(((apart * whole).sum() / size).item(), (apart.square().sum() / size).sqrt().item())


def fit_of(held: list[torch.Tensor], expected: torch.Tensor, inner: int = 1) -> Regression | None:
    """Return the fit of the ranks' tensors, replicas or shards of one dimension; of differing replicas the worst.

    `inner`: of ranks in two dimensions, the length of the second.
    """
    _, values = next(candidates(held, expected.shape), ("", []))
    differing = [dim for dim, size in enumerate(expected.shape) if held[0].shape[dim] != size]
    if inner > 1 and len(differing) == 1:
        whole = of_two_cuts(held, differing[0], expected.shape[differing[0]], inner)
        values = values if whole is None else [whole]
    fits = [found for found in (fit(value, expected) for value in values) if found is not None]
    return max(fits, key=lambda one: abs(one.slope), default=None)


def units(fits: Mapping[K, Iterable[Regression]], least: Mapping[K, float], hidden: float) -> dict[K, float]:
    """Return the unit of each slope.

    Args:
        fits: of the perturbed runs, by key.
        least: the slope of a tensor's own rounding.
        hidden: the relative difference from which on a tensor says nothing of others.
    """
    drawn = {key: list(found) for key, found in fits.items()}
    sizes = {key: _mean(one.apart for one in found) for key, found in drawn.items()}
    shares = [
        one.slope / one.apart for key, found in drawn.items() for one in found if 0 < one.apart < hidden
    ]
    return {
        key: max(least[key], _mean(shares) * sizes[key], _mean(one.slope for one in found))
        for key, found in drawn.items()
    }


def least_unit(eps: float, expected: torch.Tensor, gradient: bool) -> float:
    """Return the slope that roundings alone make: of each element by itself, or in a gradient of all together."""
    return eps / 2 if gradient else eps / max(expected.numel(), 1) ** 0.5


def _mean(values: Iterable[float]) -> float:
    """Return the root mean square, 0 of none."""
    squares = [value * value for value in values]
    return (sum(squares) / len(squares)) ** 0.5 if squares else 0.0
