"""Assembles a full tensor from the ranks' tensors, whose layout is unknown, in the way that fits best. Start at `best_fit`.

This shows where an error is, but not whether there is one, since a wrong tensor could fit one of the ways by chance.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

import torch

from titanplans.split.layout import Section, rows_of, shard_size

Candidate = tuple[str, list[torch.Tensor]]
"""How the ranks' tensors were assembled, in words, and the full tensors: one for each replica, which should be equal."""


@dataclass
class Assembly:
    """Full tensors assembled in one way, and their largest difference from the expected tensor."""

    error: float
    how: str
    values: list[torch.Tensor]


def best_fit(
    gathered: list[torch.Tensor],
    expected: torch.Tensor,
    difference: Callable[[torch.Tensor, torch.Tensor], float],
    *,
    sums: bool,
    packings: Collection[Sequence[Section]] = (),
    inner: int = 1,
) -> Assembly | None:
    """Return the assembly nearest to `expected`; None if no assembly has its shape.

    Args:
        gathered: the ranks' tensors, in rank order.
        expected: the unsplit model's tensor.
        difference: returns the difference of two tensors.
        sums: the tensors may be partial, to be summed over the ranks.
        packings: the tensors may be packed with these sections.
        inner: size of the last dimension of a 2-D mesh (tp of cp x tp).
    """
    fits = [
        Assembly(max(difference(replica, expected) for replica in full), how, full)
        for tensors in (gathered, *_over_inner(gathered, expected.shape, inner))
        for how, full in chain(candidates(tensors, expected.shape), _packed(tensors, expected, packings))
        if sums or not how.startswith("summed")
    ]
    return min(fits, key=lambda fit: fit.error, default=None)


def _over_inner(gathered: list[torch.Tensor], shape: torch.Size, inner: int) -> Iterator[list[torch.Tensor]]:
    """Yield all ranks' tensors in the order of heads (by TP rank, then CP rank); then one tensor per TP rank, gathered
    over CP."""
    if not 1 < inner < len(gathered):
        return
    by_tp_rank = [gathered[tp_rank::inner] for tp_rank in range(inner)]
    yield list(chain(*by_tp_rank))
    for dim, size in enumerate(shape):
        local_size = shard_size(size, len(gathered) // inner)
        if all(tensor.ndim == len(shape) and tensor.shape[dim] == local_size for tensor in gathered):
            yield [torch.cat(shards, dim).narrow(dim, 0, size) for shards in by_tp_rank]


def candidates(gathered: list[torch.Tensor], shape: torch.Size) -> Iterator[Candidate]:
    """Yield each assembly of the ranks' tensors, in rank order, that has `shape`."""
    if any(tensor.ndim != len(shape) for tensor in gathered):
        return
    sharded_dims = [d for d in range(len(shape)) if any(tensor.shape[d] != shape[d] for tensor in gathered)]
    if not sharded_dims:
        yield "", gathered
        yield "summed over the ranks", [torch.stack(gathered).sum(0)]
    elif len(sharded_dims) == 1:
        (dim,) = sharded_dims
        for group in range(1, len(gathered)):
            if len(gathered) % group == 0:
                yield from _concatenations(gathered, dim, shape[dim], group)
                if group > 1 and (full := _from_2d_shards(gathered, dim, shape[dim], group)) is not None:
                    yield "", [full]


def _packed(
    gathered: list[torch.Tensor], expected: torch.Tensor, packings: Collection[Sequence[Section]]
) -> Iterator[Candidate]:
    """Yield the assemblies of packed tensors: sections that several ranks hold are replicas, or partial sums."""
    for sections, dim in product(packings, range(expected.ndim)):
        rows = rows_of(0, sections, len(gathered))
        starts = [(rank, run, run.first_row(rank)) for rank in range(len(gathered)) for run in rows.runs]
        if any(
            tensor.ndim != expected.ndim or tensor.shape[dim] != sum(run.row_count(rank) for run in rows.runs)
            for rank, tensor in enumerate(gathered)
        ):
            continue
        if expected.shape[dim] != max(start + run.row_count(rank) for rank, run, start in starts):
            continue
        for how in ("", "summed over the ranks that share heads"):
            full = torch.zeros_like(expected)
            for rank, tensor in enumerate(gathered):
                local_slices = tensor.to(full.dtype).split([run.row_count(rank) for run in rows.runs], dim)
                for local_slice, run in zip(local_slices, rows.runs, strict=True):
                    target = full.narrow(dim, run.first_row(rank), run.row_count(rank))
                    if how:
                        target += local_slice
                    else:
                        target.copy_(local_slice)
            yield how, [full]


def _from_2d_shards(gathered: list[torch.Tensor], dim: int, size: int, inner: int) -> torch.Tensor | None:
    """Return the full tensor whose shards over a 2-D mesh, with a last dimension of `inner` ranks, are `gathered`.

    The shards hold tokens; along each mesh dimension the last shards may be padded at their end. Return None if the shards
    have another size.
    """
    outer_size = shard_size(size, len(gathered) // inner)
    if all(tensor.shape[dim] == shard_size(outer_size, inner) for tensor in gathered):
        groups = [gathered[start : start + inner] for start in range(0, len(gathered), inner)]
        outer_shards = [torch.cat(group, dim).narrow(dim, 0, outer_size) for group in groups]
        return torch.cat(outer_shards, dim).narrow(dim, 0, size)
    return None


def _concatenations(gathered: list[torch.Tensor], dim: int, size: int, group: int) -> Iterator[Candidate]:
    """Yield the assemblies of shards along `dim`, with each shard on `group` consecutive ranks as replicas or partial sums.

    The last shards may be padded.
    """
    total = sum(tensor.shape[dim] for tensor in gathered[::group])
    if not size <= total < size + len(gathered):
        return
    replicas = [gathered[offset::group] for offset in range(group)]
    note = f"the same on each {group} ranks" if group > 1 else ""
    yield note, [torch.cat(shards, dim).narrow(dim, 0, size) for shards in replicas]
    if group > 1:
        sums = [torch.stack(partials).sum(0) for partials in zip(*replicas, strict=True)]
        yield f"summed over each {group} ranks", [torch.cat(sums, dim).narrow(dim, 0, size)]
