"""One tensor from the ranks' parts if nothing says how it was split: assembled in the way that fits best.

This tells where an error is, never whether there is one: a wrong tensor could fit one of the ways by chance.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

import torch

from titanplans.split.layout import Section, rows_of, shard_size

Candidate = tuple[str, list[torch.Tensor]]
"""How the ranks' tensors were assembled, and the whole tensors that result, which should all be equal."""


@dataclass
class Assembly:
    """A way to assemble the ranks' tensors, and its difference from the expected tensor."""

    error: float
    how: str
    values: list[torch.Tensor]


def best_fit(
    held: list[torch.Tensor],
    expected: torch.Tensor,
    difference: Callable[[torch.Tensor, torch.Tensor], float],
    *,
    sums: bool,
    packings: Collection[Sequence[Section]] = (),
    inner: int = 1,
) -> Assembly | None:
    """Return the assembly of the ranks' tensors `held`, in rank order, nearest to `expected`; None if none has its shape.

    With `sums` the tensors may also be parts of a sum over the ranks; with `packings` they may hold sections. `inner`: of
    ranks in two dimensions, the length of the second.
    """
    fits = [
        Assembly(max(difference(whole, expected) for whole in wholes), how, wholes)
        for parts in (held, *_of_inner(held, expected.shape, inner))
        for how, wholes in chain(candidates(parts, expected.shape), _packed(parts, expected, packings))
        if sums or not how.startswith("summed")
    ]
    return min(fits, key=lambda fit: fit.error, default=None)


def _of_inner(held: list[torch.Tensor], shape: torch.Size, inner: int) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in the order of heads, those of the second dimension first; and of each rank of it, all tokens."""
    if not 1 < inner < len(held):
        return
    columns = [held[first::inner] for first in range(inner)]
    yield list(chain(*columns))
    for dim, size in enumerate(shape):
        part = shard_size(size, len(held) // inner)
        if all(tensor.ndim == len(shape) and tensor.shape[dim] == part for tensor in held):
            yield [torch.cat(column, dim).narrow(dim, 0, size) for column in columns]


def candidates(held: list[torch.Tensor], shape: torch.Size) -> Iterator[Candidate]:
    """Yield each assembly of the ranks' tensors `held`, in rank order, that has `shape`."""
    if any(tensor.ndim != len(shape) for tensor in held):
        return
    differing = [d for d in range(len(shape)) if any(tensor.shape[d] != shape[d] for tensor in held)]
    if not differing:
        yield "", held
        yield "summed over the ranks", [torch.stack(held).sum(0)]
    elif len(differing) == 1:
        (dim,) = differing
        for sharing in range(1, len(held)):
            if len(held) % sharing == 0:
                yield from _concatenations(held, dim, shape[dim], sharing)
                if sharing > 1 and (whole := of_two_cuts(held, dim, shape[dim], sharing)) is not None:
                    yield "", [whole]


def _packed(
    held: list[torch.Tensor], expected: torch.Tensor, packings: Collection[Sequence[Section]]
) -> Iterator[Candidate]:
    """Yield the assemblies by sections, each put in its place; sections that ranks share, as equal or as a sum."""
    for sections, dim in product(packings, range(expected.ndim)):
        rows = rows_of(0, sections, len(held))
        starts = [(rank, run, run.first_row(rank)) for rank in range(len(held)) for run in rows.runs]
        if any(
            one.ndim != expected.ndim or one.shape[dim] != sum(run.row_count(rank) for run in rows.runs)
            for rank, one in enumerate(held)
        ):
            continue
        if expected.shape[dim] != max(start + run.row_count(rank) for rank, run, start in starts):
            continue
        for how in ("", "summed over the ranks that share heads"):
            whole = torch.zeros_like(expected)
            for rank, one in enumerate(held):
                parts = one.to(whole.dtype).split([run.row_count(rank) for run in rows.runs], dim)
                for part, run in zip(parts, rows.runs, strict=True):
                    place = whole.narrow(dim, run.first_row(rank), run.row_count(rank))
                    if how:
                        place += part
                    else:
                        place.copy_(part)
            yield how, [whole]


def of_two_cuts(held: list[torch.Tensor], dim: int, size: int, inner: int) -> torch.Tensor | None:
    """Return the tensor whose shards, over a mesh of two dimensions, the second of length `inner`, are `held`.

    They are tokens, each part of a sequence filled up by itself; None if they are of another length.
    """
    part = shard_size(size, len(held) // inner)
    if all(tensor.shape[dim] == shard_size(part, inner) for tensor in held):
        rows = [held[at : at + inner] for at in range(0, len(held), inner)]
        parts = [torch.cat(row, dim).narrow(dim, 0, part) for row in rows]
        return torch.cat(parts, dim).narrow(dim, 0, size)
    return None


def _concatenations(held: list[torch.Tensor], dim: int, size: int, sharing: int) -> Iterator[Candidate]:
    """Yield assemblies of shards along `dim`, each held by `sharing` consecutive ranks, the last ones perhaps padded."""
    total = sum(tensor.shape[dim] for tensor in held[::sharing])
    if not size <= total < size + len(held):
        return
    columns = [held[offset::sharing] for offset in range(sharing)]
    note = f"the same on each {sharing} ranks" if sharing > 1 else ""
    yield note, [torch.cat(column, dim).narrow(dim, 0, size) for column in columns]
    if sharing > 1:
        sums = [torch.stack(shards).sum(0) for shards in zip(*columns, strict=True)]
        yield f"summed over each {sharing} ranks", [torch.cat(sums, dim).narrow(dim, 0, size)]
