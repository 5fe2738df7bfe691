"""Cross entropy of a share of the vocabulary: what every loss here computes of the logits that a rank holds.

A rank sends two numbers a token, in one all-gather: the logarithm of its sum of exponentials, and its label's logit; and
the sum of its logits, where labels are smoothed. Of these each rank has the loss of the whole vocabulary, and with it the
gradient of its own logits, which is made in their place.
"""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanplans.errors import ParallelError
from titanplans.loss.operators import Read, read_by_operators
from titanplans.split.collectives import Group, all_gather, group_of
from titanplans.split.layout import shard_size
from titanplans.torch_private.dispatch import assert_async

IGNORED = -100
"""The label of a token that does not count: torch's default."""


class Objective(NamedTuple):
    """The terms added to the cross entropy of each token that counts."""

    label_smoothing: float = 0.0
    """The share of a label that all tokens of the vocabulary have alike (Szegedy et al., arXiv 1512.00567): 0 to below 1."""

    z_loss: float = 0.0
    """The weight of the squared logarithm of the sum of exponentials (PaLM, arXiv 2204.02311, has 1e-4)."""

    def checked(self) -> "Objective":
        """Return itself.

        Raises:
            ParallelError: a value that it can't have.
        """
        if not 0 <= self.label_smoothing < 1:
            raise ParallelError(f"label_smoothing = {self.label_smoothing}: from 0 to below 1")
        if not 0 <= self.z_loss < float("inf"):
            raise ParallelError(f"z_loss = {self.z_loss}: 0, or a positive number such as 1e-4")
        return self


class VocabularyShare(NamedTuple):
    """Which part of a vocabulary a rank holds."""

    first: torch.Tensor
    """[1], its first token id."""
    size: int
    """Of an even share; the last ranks may hold fewer, or none."""
    vocabulary: int
    group: Group


def share_of(vocabulary: int, mesh: DeviceMesh, device: torch.device) -> VocabularyShare:
    """Return this rank's share of a vocabulary that is sharded over a 1-D `mesh`, evenly or not."""
    size = shard_size(vocabulary, mesh.size())
    firsts = torch.arange(mesh.size(), device=device) * size
    return VocabularyShare(firsts.narrow(0, mesh.get_local_rank(), 1), size, vocabulary, group_of(mesh))


def entropy_and_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    share: VocabularyShare | None,
    objective: Objective,
    wanted: bool,
    read: Read | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of some tokens, float32 or wider, and its gradient with respect to `logits`, of their dtype.

    Args:
        logits: [tokens, share of the vocabulary]; may be overwritten.
        labels: [tokens], token ids; -100 where a token does not count.
        share: which part of the vocabulary; None for all of it.
        objective: the added terms.
        wanted: whether the gradient is needed; if not, the tensor returned in its place means nothing.
        read: None for Triton's kernels on a GPU, and torch's operators elsewhere, and where a compiler sees them.
    """
    vocabulary = logits.shape[-1] if share is None else share.vocabulary
    counts = labels != IGNORED
    valid = ~counts | ((labels >= 0) & (labels < vocabulary))
    assert_async(valid.all(), "a label outside of the vocabulary")
    # Counted labels are below `vocabulary`: that the last shares have fewer columns needs no test.
    mine = counts if share is None else counts & (labels >= share.first) & (labels < share.first + share.size)
    index = torch.where(mine, labels if share is None else labels - share.first, 0)
    smooth = objective.label_smoothing
    (log_sum, own, sums), gradient = (read or _reader(logits))(logits, mine, index, smooth > 0)
    if share is not None:
        log_sum, own, sums = _over_ranks(log_sum, own, sums, share.group)
    losses = log_sum - (1 - smooth) * own
    if objective.z_loss:
        losses = losses + objective.z_loss * log_sum.square()
    if sums is not None:
        losses = losses - smooth / vocabulary * sums
    loss = torch.where(counts, losses, 0).sum()
    if not wanted:
        return loss, logits
    counted = counts.to(log_sum.dtype)
    scale = counted * (1 + 2 * objective.z_loss * log_sum) if objective.z_loss else counted
    of_label = mine.to(log_sum.dtype) * (1 - smooth)
    return loss, gradient(log_sum, scale, of_label, counted * (smooth / vocabulary))


def _reader(logits: torch.Tensor) -> Read:
    if not logits.is_cuda or type(logits) is not torch.Tensor or torch.compiler.is_compiling():
        return read_by_operators
    from titanplans.loss import kernels

    return kernels.read


def _over_ranks(
    log_sum: torch.Tensor, own: torch.Tensor, sums: torch.Tensor | None, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the same of the whole vocabulary, by one all-gather of what the ranks have of each token."""
    mine = torch.stack([log_sum, own] if sums is None else [log_sum, own, sums])
    ranks = all_gather(mine[None], 0, group[1], group)
    rest = ranks[:, 1:].sum(0)
    return ranks[:, 0].logsumexp(0), rest[0], rest[1] if sums is not None else None
