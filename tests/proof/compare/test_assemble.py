"""Local tensors are assembled to the full tensor. Of the possible ways, the one with the smallest error is used."""

import torch

from titanplans.proof.compare.assemble import best_fit
from titanplans.proof.compare.tolerance import difference


def fit(local_tensors, expected, sums=True, **ranks):
    best = best_fit(local_tensors, expected, difference, sums=sums, **ranks)
    return None if best is None else (best.error, best.how)


def test_local_tensors_are_assembled_in_the_way_that_fits_best():
    full = torch.randn(2, 12, 5, dtype=torch.float64)
    summands = [torch.randn_like(full) for _ in range(3)]
    summands.append(full - sum(summands))
    assert fit([full] * 4, full) == (0.0, "")
    error, how = fit(summands, full)
    assert error < 1e-14
    assert how == "summed over the ranks"
    error, how = fit(summands, full, sums=False)
    assert error > 0.1
    assert fit(list(full.chunk(4, 1)), full) == (0.0, "")
    padded = torch.cat([full[:, :10], torch.zeros(2, 2, 5)], 1).chunk(4, 1)
    assert fit(list(padded), full[:, :10]) == (0.0, ""), "three tokens a rank, the last two of them padding"
    heads = [half for half in full.chunk(2, 1) for _ in range(2)]
    assert fit(heads, full) == (0.0, "the same on each 2 ranks")
    halves = [half * factor for half in full.chunk(2, 1) for factor in (0.25, 0.75)]
    assert fit(halves, full)[1] == "summed over each 2 ranks"
    assert fit([full[:1, :3]] * 4, full) is None
    assert fit(list(full.chunk(4, 1)), full.flatten(0, 1)) is None


def test_local_tensors_over_cp_and_tp_are_assembled():
    """The outer dimension (cp) splits tokens, the inner (tp) widths. Ranks of a mixer have all tokens of their heads."""
    full = torch.randn(2, 7, 12, dtype=torch.float64)
    padded = torch.cat([full, torch.zeros(2, 1, 12)], 1).chunk(2, 1)
    widths = [width for tokens in padded for width in tokens.chunk(2, -1)]
    assert fit(widths, full) is None
    assert fit(widths, full, inner=2) == (0.0, "")
    first, second, third, fourth = full.chunk(4, -1)
    heads = [first, third, second, fourth]
    assert fit(heads, full)[0] > 0.1
    assert fit(heads, full, inner=2) == (0.0, "")
    packed = [shard for tokens in padded for shard in _sections(tokens)]
    assert fit(packed, full, inner=2)[0] > 0.1
    assert fit(packed, full, inner=2, packings=[(8, 4)]) == (0.0, "")


def _sections(x):
    """Return the packed shards of two ranks: each has half of a section of 8 rows, and half of a section of 4 rows."""
    first, second = (section.chunk(2, -1) for section in x.split([8, 4], -1))
    return [torch.cat(halves, -1) for halves in zip(first, second, strict=True)]
