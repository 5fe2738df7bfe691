"""Softmax statistics of a rank's logits, and their gradient, by torch operators; `kernels` has the same for a GPU."""

from collections.abc import Callable

import torch

Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Read = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[Statistics, Callable[..., torch.Tensor]]
]
"""`read_by_operators`, or `kernels.read`."""


def read_by_operators(
    logits: torch.Tensor, mine: torch.Tensor, index: torch.Tensor, summed: bool
) -> tuple[Statistics, Callable[..., torch.Tensor]]:
    """Return the statistics of `logits` that a rank sends, and a function that overwrites them by their gradient.

    Args:
        logits: [tokens, share of the vocabulary]; overwritten where they are float32 or wider.
        mine: [tokens], whether the label is in this share.
        index: [tokens], its column here; 0 where it is not.
        summed: whether to return the sums of logits.

    Returns:
        The logsumexp, the label's logit or 0, and the sum of logits or None, [tokens] each; and a function of four such: the
        logsumexp over all shares, the factor of the probabilities, and what to subtract at the label and at each logit.
    """
    dtype, width = logits.dtype, logits.shape[-1]
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    if width:
        own = torch.where(mine, logits.gather(-1, index[:, None])[:, 0], 0)
        # Finite, so that a share of logits that are all -inf has a sum of 0.
        largest = logits.amax(-1).clamp_min(torch.finfo(logits.dtype).min)
    else:
        own = logits.new_zeros(index.shape)
        largest = logits.new_full(index.shape, -torch.inf)
    sums = logits.sum(-1) if summed else None
    exponentials = logits.sub_(largest[:, None]).exp_()

    def gradient(log_sum: torch.Tensor, scale: torch.Tensor, own: torch.Tensor, shift: torch.Tensor):
        exponentials.mul_(((largest - log_sum).exp() * scale)[:, None])
        if width:
            exponentials.scatter_add_(-1, index[:, None], -own[:, None])
        if summed:
            exponentials.sub_(shift[:, None])
        return exponentials.to(dtype)

    return (largest + exponentials.sum(-1).log(), own, sums), gradient
