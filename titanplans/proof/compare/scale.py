"""How many times too large what a block, a mixer or an MLP gives is, by a fit over all of its elements; in 16 bits.

There the difference of two tensors is rounding for a hundredth of them and more, so that a tenth of a unit too much is not
seen in it. But roundings point in all directions, and a wrong scale in one: that of the tensor. So with d = split - whole

    slope = <d, whole> / <whole, whole>

is what a regression of the split tensor on the whole one gives beside 1. It is compared for the outputs of blocks, mixers
and MLPs, whose layout is known, and for the gradients of these outputs.

Its unit is measured by the whole model's perturbed runs: the root mean square of the slope in them, which does not grow with
their number. A slope is one number, which by chance is near 0 in a few. So the unit is no less than the tensor's whole
difference in these runs times how much of a difference lies in a tensor's direction, as root mean squares over all such
tensors of the training.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from titanplans.plan.decoder import find_decoder
from titanplans.proof.compare.assemble import candidates
from titanplans.proof.compare.record import Recorder, module_name

K = TypeVar("K")

SCALE = "scale"
"""The kind of these quantities."""


class Regression(NamedTuple):
    """A tensor beside the one that is expected."""

    slope: float
    apart: float
    """The root mean square of their difference, relative to that of the expected one."""


def watched(model: nn.Module) -> frozenset[str]:
    """Return the names of the blocks of `model`, their mixers and their MLPs."""
    decoder = find_decoder(model, required=False)
    return frozenset((*decoder.names, *decoder.mixers, *decoder.mlps))


def recorded(record: Recorder, names: Collection[str]) -> dict[tuple[str, str], torch.Tensor]:
    """Return as quantities what `record` has of the modules `names`: outputs, and after the backward their gradients."""
    return {(SCALE, key): record.tensors[key] for key in sorted(record.tensors) if module_name(key) in names}


def fit(value: torch.Tensor, expected: torch.Tensor) -> Regression | None:
    """Return how `value` fits; None if one is all zeros, or the shapes differ."""
    if value.shape != expected.shape:
        return None
    whole = expected.double()
    apart, size = value.double() - whole, whole.square().sum()
    if not size:
        return None
    return Regression(((apart * whole).sum() / size).item(), (apart.square().sum() / size).sqrt().item())


def fit_of(held: list[torch.Tensor], expected: torch.Tensor) -> Regression | None:
    """Return the fit of what the ranks hold, replicas or shards of one dimension; the worst of differing replicas."""
    _, values = next(candidates(held, expected.shape), ("", []))
    fits = [found for found in (fit(value, expected) for value in values) if found is not None]
    return max(fits, key=lambda one: abs(one.slope), default=None)


def units(fits: Mapping[K, Iterable[Regression]], least: Mapping[K, float], hidden: float) -> dict[K, float]:
    """Return the unit of each slope.

    Args:
        fits: of the perturbed runs, by key.
        least: the slope that a tensor's own rounding makes.
        hidden: where a tensor differs by this much it says nothing of others.
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


def _mean(values: Iterable[float]) -> float:
    """Return the root mean square, 0 of none."""
    squares = [value * value for value in values]
    return (sum(squares) / len(squares)) ** 0.5 if squares else 0.0
