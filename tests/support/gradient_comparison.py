"""Compare two computations: their outputs and the gradients of their inputs."""

from collections.abc import Iterable

import torch


def weighed(outputs: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a weighted sum of all elements of the outputs, in which each element has a different weight."""
    return sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in outputs)


def same(got, want, leaves, tolerance=1e-12):
    """Check that two results, tensors or tuples of tensors, agree, and their gradients with respect to `leaves`, too.

    The default tolerance is for float64 sums of some hundred terms of order 1.
    """
    outputs = [
        [x for x in (y if isinstance(y, tuple | list) else (y,)) if x is not None] for y in (got, want)
    ]
    leaves = [x for x in leaves if x is not None]
    compared = ([*xs, *torch.autograd.grad(weighed(xs), leaves, retain_graph=True)] for xs in outputs)
    for a, b in zip(*compared, strict=True):
        assert a.dtype == b.dtype == leaves[0].dtype
        assert a.isfinite().all()
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())
