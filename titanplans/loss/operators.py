"""Softmax statistics of a rank's logits, and their gradient, with torch operators. `kernels` has the same for a GPU."""

from collections.abc import Callable

import torch

Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Read = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[Statistics, Callable[..., torch.Tensor]]
]
"""The type of `read_by_operators` and of `kernels.read`."""


def read_by_operators(
    logits: torch.Tensor, mine: torch.Tensor, index: torch.Tensor, summed: bool
) -> tuple[Statistics, Callable[..., torch.Tensor]]:
    """Return the softmax statistics of `logits`, and a function that computes their gradient.

    Args:
        logits: [tokens, shard of the vocabulary]; overwritten if they are float32 or wider.
        mine: [tokens], whether the label is in this shard.
        index: [tokens], the label's column in this shard; 0 if the label is in another shard.
        summed: return the sums of logits, too.

    Returns:
        The statistics, each [tokens]: the logsumexp over this shard, the label's logit (0 if it is in another shard), and
        the sum of logits or None. The function takes four tensors [tokens]: the logsumexp over the vocabulary, a
        factor of the probabilities, a number to subtract at the label, and a number to subtract everywhere. It returns the
        gradient, [tokens, shard of the vocabulary], and can be called only once.
    """
    dtype, width = logits.dtype, logits.shape[-1]
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    if width:
        label_logit = torch.where(mine, logits.gather(-1, index[:, None])[:, 0], 0)
        # Keep the maximum finite, so that a shard whose logits are all -inf has a sum of exponentials of 0, not NaN.
        largest = logits.amax(-1).clamp_min(torch.finfo(logits.dtype).min)
    else:
        label_logit = logits.new_zeros(index.shape)
        largest = logits.new_full(index.shape, -torch.inf)
    sums = logits.sum(-1) if summed else None
    # In place: from here on `logits` holds the exponentials. `gradient` overwrites them with the gradient.
    exponentials = logits.sub_(largest[:, None]).exp_()

    def gradient(log_sum: torch.Tensor, scale: torch.Tensor, at_label: torch.Tensor, shift: torch.Tensor):
        exponentials.mul_(((largest - log_sum).exp() * scale)[:, None])
        if width:
            exponentials.scatter_add_(-1, index[:, None], -at_label[:, None])
        if summed:
            exponentials.sub_(shift[:, None])
        return exponentials.to(dtype)

    return (largest + exponentials.sum(-1).log(), label_logit, sums), gradient
