"""`cross_entropy` of logits that may be sharded over the vocabulary, and the number of tokens to divide it by."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titanplans.errors import ParallelError
from titanplans.loss.deferred_logits import DeferredLogits
from titanplans.loss.sharded_logits import (
    IGNORED,
    Objective,
    VocabularyShard,
    entropy_and_gradient,
    vocabulary_shard,
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

    The sum of these values over micro batches and data-parallel ranks is the mean over the global batch. So gradients have
    to be summed over ranks and micro batches, not averaged.

    Logits that are sharded over the vocabulary are not gathered: the ranks all-gather two numbers per token, the logsumexp
    of their logits and the label's logit (three with label smoothing). The backward communicates nothing.

    Args:
        logits: [..., vocabulary]; a tensor, or a DTensor that is replicated, or sharded over the vocabulary, the tokens, or
            both, evenly or not; or the `DeferredLogits` of a head that has computed the loss (`FusedLoss`).
        labels: [...], token ids; -100 for an ignored token. The same on all ranks of the logits' mesh.
        tokens: number of labels in the global batch that are not ignored, from `count_tokens`.
        label_smoothing: probability spread evenly over the vocabulary, from 0 to below 1.
        z_loss: weight of the squared logsumexp of the logits, which is added to the loss.

    Raises:
        ParallelError: the shapes don't match, the logits have another placement, or the head computed another loss.
    """
    objective = Objective(label_smoothing, z_loss).checked()
    if isinstance(logits, DeferredLogits):
        return logits.loss(labels, objective) / tokens
    if logits.shape[:-1] != labels.shape:
        raise ParallelError(
            f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}: give one label for each "
            "position, the id of the next token"
        )
    shard: VocabularyShard | None = None
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        label_placements: list[Placement] = [Replicate()] * mesh.ndim
        for axis, placement in enumerate(logits.placements):
            if isinstance(placement, Shard) and placement.dim < labels.ndim:  # shards the tokens
                label_placements[axis] = placement
            elif placement.is_shard() and shard is None:  # shards the vocabulary
                submesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[axis]]  # type: ignore[index]
                shard = vocabulary_shard(logits.shape[-1], submesh, labels.device)
            elif not placement.is_replicate():
                raise ParallelError(
                    f"logits with placements {logits.placements}: give replicated logits, or shards of the vocabulary and "
                    "the tokens"
                )
        labels = local_shard(labels, mesh, tuple(label_placements), name="labels")
        logits = logits.to_local()
    flat, ids = logits.flatten(0, -2), labels.reshape(-1)
    if shard is not None:
        loss = _ShardedCrossEntropy.apply(flat, ids, shard, objective, torch.is_grad_enabled())
        return cast(torch.Tensor, loss) / tokens
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    total = torch.nn.functional.cross_entropy(
        flat, ids, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing
    )
    if z_loss:
        total = total + z_loss * torch.where(ids != IGNORED, flat.logsumexp(-1).square(), 0).sum()
    return total / tokens


def count_tokens(labels: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Return the number of labels that are not ignored, summed over the ranks of `mesh`; int64, on the labels' device.

    Args:
        labels: the labels of all micro batches of a step on this rank.
        mesh: 1-D mesh of the ranks that read different data. None: this rank only.
    """
    count = (labels != IGNORED).sum()
    if mesh is not None and mesh.size() > 1:
        dist.all_reduce(count, group=mesh.get_group())
    return count


class _ShardedCrossEntropy(torch.autograd.Function):
    """The summed cross entropy of logits [tokens, shard of the vocabulary]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        shard: VocabularyShard,
        objective: Objective,
        grad_enabled: bool,
    ) -> torch.Tensor:
        # In a Function's forward gradients are off, so the caller passes whether they were on.
        needs_gradient = grad_enabled and ctx.needs_input_grad[0]
        # A copy, because the gradient overwrites it, and the model or the user may still use the logits.
        loss, gradient = entropy_and_gradient(logits.clone(), labels, shard, objective, needs_gradient)
        if needs_gradient:
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
