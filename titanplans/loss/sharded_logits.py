"""Cross entropy of logits that are sharded over the vocabulary. Start at `entropy_and_gradient`.

Each rank sends two numbers per token in one all-gather: the logsumexp of its logits, and the label's logit. With label
smoothing it also sends the sum of its logits. From these each rank computes the loss over the full vocabulary, and the
gradient of its shard of the logits.
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
"""The label of a token that the loss ignores: torch's default."""


class Objective(NamedTuple):
    """Terms that are added to the cross entropy of each token."""

    label_smoothing: float = 0.0
    """Probability spread evenly over the vocabulary, from 0 to below 1 (Szegedy et al., arXiv 1512.00567)."""

    z_loss: float = 0.0
    """Weight of the squared logsumexp of the logits (PaLM, arXiv 2204.02311, uses 1e-4)."""

    def checked(self) -> "Objective":
        """Return this objective, or raise ParallelError if a value is out of range."""
        if not 0 <= self.label_smoothing < 1:
            raise ParallelError(f"label_smoothing = {self.label_smoothing}: use a number from 0 to below 1")
        if not 0 <= self.z_loss < float("inf"):
            raise ParallelError(f"z_loss = {self.z_loss}: use 0, or a positive number such as 1e-4")
        return self


class VocabularyShard(NamedTuple):
    """The contiguous range of token ids whose logits a rank holds."""

    first: torch.Tensor
    """[1], the first token id."""
    size: int
    """Size of a full shard. The last ranks may hold fewer token ids, or none."""
    vocabulary: int
    """Size of the full vocabulary."""
    group: Group
    """The ranks that the vocabulary is sharded over."""


def vocabulary_shard(vocabulary: int, mesh: DeviceMesh, device: torch.device) -> VocabularyShard:
    """Return this rank's shard of a vocabulary of this size over a 1-D `mesh`, evenly sharded or not."""
    size = shard_size(vocabulary, mesh.size())
    firsts = torch.arange(mesh.size(), device=device) * size
    return VocabularyShard(firsts.narrow(0, mesh.get_local_rank(), 1), size, vocabulary, group_of(mesh))


def entropy_and_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabularyShard | None,
    objective: Objective,
    needs_gradient: bool,
    read: Read | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of all tokens, and its gradient with respect to `logits`.

    The loss is float32 or wider; the gradient has the dtype of `logits`.

    Args:
        logits: [tokens, shard of the vocabulary]; may be overwritten.
        labels: [tokens], token ids, the same on all ranks; -100 for an ignored token.
        shard: this rank's shard of the vocabulary. None: `logits` cover the full vocabulary.
        objective: the terms added to the cross entropy.
        needs_gradient: compute the gradient. If not, an arbitrary tensor is returned in its place.
        read: returns the softmax statistics of `logits`, and a function that computes the gradient (see
            `titanplans.loss.operators`). None: Triton kernels on a GPU, and torch operators on other devices and under
            torch.compile.
    """
    vocabulary = logits.shape[-1] if shard is None else shard.vocabulary
    is_counted = labels != IGNORED
    is_valid = ~is_counted | ((labels >= 0) & (labels < vocabulary))
    # Check on the device, since a check on the host would wait for the device.
    assert_async(is_valid.all(), "a label outside of the vocabulary")
    # The last shards may have fewer than `size` columns. Labels above them can't occur, since all labels are below
    # `vocabulary`.
    is_local = (
        is_counted
        if shard is None
        else is_counted & (labels >= shard.first) & (labels < shard.first + shard.size)
    )
    index = torch.where(is_local, labels if shard is None else labels - shard.first, 0)
    smoothing = objective.label_smoothing
    (log_sum, label_logit, sums), gradient = (read or _reader(logits))(logits, is_local, index, smoothing > 0)
    if shard is not None:
        log_sum, label_logit, sums = _over_ranks(log_sum, label_logit, sums, shard.group)
    losses = log_sum - (1 - smoothing) * label_logit
    if objective.z_loss:
        losses = losses + objective.z_loss * log_sum.square()
    if sums is not None:
        losses = losses - smoothing / vocabulary * sums
    loss = torch.where(is_counted, losses, 0).sum()
    if not needs_gradient:
        return loss, logits
    counted = is_counted.to(log_sum.dtype)
    scale = counted * (1 + 2 * objective.z_loss * log_sum) if objective.z_loss else counted
    at_label = is_local.to(log_sum.dtype) * (1 - smoothing)
    return loss, gradient(log_sum, scale, at_label, counted * (smoothing / vocabulary))


def _reader(logits: torch.Tensor) -> Read:
    if not logits.is_cuda or type(logits) is not torch.Tensor or torch.compiler.is_compiling():
        return read_by_operators
    from titanplans.loss import kernels  # imports triton, which a CPU-only installation may lack

    return kernels.read


def _over_ranks(
    log_sum: torch.Tensor, label_logit: torch.Tensor, sums: torch.Tensor | None, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Combine the shards' statistics into the statistics of the full vocabulary, with one all-gather."""
    local = torch.stack([log_sum, label_logit] if sums is None else [log_sum, label_logit, sums])
    by_rank = all_gather(local[None], 0, group[1], group)  # [ranks, statistics, tokens]
    totals = by_rank[:, 1:].sum(0)
    return by_rank[:, 0].logsumexp(0), totals[0], totals[1] if sums is not None else None
