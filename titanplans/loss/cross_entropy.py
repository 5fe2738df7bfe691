"""Cross entropy of logits that may be sharded over the vocabulary, as every loop here needs it: a sum over
tokens, divided by the tokens of the whole batch, so that gradients are summed over ranks and micro batches.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titanplans.errors import ParallelError
from titanplans.loss.deferred_logits import DeferredLogits
from titanplans.loss.shares import (
    IGNORED,
    Objective,
    VocabularyShare,
    entropy_and_gradient,
    share_of,
)
from titanplans.split.parameters.shards import local_shard


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tokens: int | torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Return the cross entropy of this rank's tokens, in nats, divided by `tokens`; a plain scalar, float32 or wider.

    Summed over ranks with other data, and over micro batches, it is the mean over the whole batch.

    Logits that are sharded over the vocabulary stay so: one all-gather of two numbers per token and rank, the logarithm of
    the sum of exponentials and the label's logit; the backward communicates nothing.

    Args:
        logits: [..., vocabulary]; a tensor, or a DTensor, replicated, or sharded over the vocabulary, the tokens, or both,
            evenly or not; or what stands in for them where the head has computed the loss (`FusedLoss`).
        labels: [...], token ids; -100 where a token does not count. The same on all ranks of the logits' mesh.
        tokens: how many count in the whole batch: see `count_tokens`.
        label_smoothing: the share of a label that all tokens of the vocabulary have alike, from 0 to below 1.
        z_loss: the weight of the squared logarithm of the sum of exponentials, which is added.

    Raises:
        ParallelError: the shapes don't match, or the logits have another placement; or the head computed another loss.
    """
    objective = Objective(label_smoothing, z_loss).checked()
    if isinstance(logits, DeferredLogits):
        return logits.loss(labels, objective) / tokens
    if logits.shape[:-1] != labels.shape:
        raise ParallelError(
            f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}: one label for each "
            "position, the next token's"
        )
    share: VocabularyShare | None = None
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        of_labels: list[Placement] = [Replicate()] * mesh.ndim
        for axis, placement in enumerate(logits.placements):
            if isinstance(placement, Shard) and placement.dim < labels.ndim:
                of_labels[axis] = placement
            elif placement.is_shard() and share is None:
                over = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[axis]]  # type: ignore[index]
                share = share_of(logits.shape[-1], over, labels.device)
            elif not placement.is_replicate():
                raise ParallelError(
                    f"logits with placements {logits.placements}: give replicated logits, or shards of the vocabulary and "
                    "the tokens"
                )
        labels = local_shard(labels, mesh, tuple(of_labels), name="labels")
        logits = logits.to_local()
    flat, ids = logits.flatten(0, -2), labels.reshape(-1)
    if share is not None:
        return (
            cast(torch.Tensor, _Sharded.apply(flat, ids, share, objective, torch.is_grad_enabled())) / tokens
        )
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    total = torch.nn.functional.cross_entropy(
        flat, ids, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing
    )
    if z_loss:
        total = total + z_loss * torch.where(ids != IGNORED, flat.logsumexp(-1).square(), 0).sum()
    return total / tokens


def count_tokens(labels: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Return how many labels count, on all ranks of `mesh` together; a scalar on the labels' device, int64.

    Args:
        labels: of all micro batches of a step on this rank.
        mesh: 1-D: the ranks that read different data; None for this rank alone.
    """
    count = (labels != IGNORED).sum()
    if mesh is not None and mesh.size() > 1:
        dist.all_reduce(count, group=mesh.get_group())
    return count


class _Sharded(torch.autograd.Function):
    """The sum of cross entropies of logits [tokens, share of the vocabulary]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        share: VocabularyShare,
        objective: Objective,
        recorded: bool,
    ) -> torch.Tensor:
        wanted = recorded and ctx.needs_input_grad[0]
        loss, gradient = entropy_and_gradient(logits.clone(), labels, share, objective, wanted)
        if wanted:
            ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        if torch.is_grad_enabled():
            raise ParallelError(
                "the gradient of a cross entropy over logits that are sharded over the vocabulary can't be differentiated "
                "again (create_graph = True): split the model with loss_parallel = False"
            )
        (gradient,) = ctx.saved_tensors
        return (gradient * grad).to(gradient.dtype), None, None, None, None
