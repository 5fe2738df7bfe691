"""CPU replacements for FLA's cross entropy and fused linear cross entropy.

They are not fused: the logits of all tokens are kept for the backward.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanplans.errors import KernelError
from titanplans.kernels.precision import accumulation_dtype


def cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss [N], including the z-loss, and the z-loss, for logits [N, V] and targets [N].

    The result is float32, or float64 for float64 logits. `inplace_backward`, which saves memory in FLA's kernel, has no
    effect.

    Raises:
        KernelError: the vocabulary is sharded over `process_group`.
    """
    if process_group is not None and dist.get_world_size(process_group) > 1:
        raise KernelError(
            "FusedCrossEntropyLoss: process_group (a sharded vocabulary) is not computed on a CPU: "
            "use torch.distributed.tensor.parallel.loss_parallel"
        )
    logits = logits.to(accumulation_dtype(logits)) * logit_scale
    if logit_softcapping is not None:
        logits = logit_softcapping * torch.tanh(logits / logit_softcapping)
    loss = F.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    if not lse_square_scale:
        return loss, torch.zeros_like(loss)
    z_loss = lse_square_scale * logits.logsumexp(-1).square() * (target != ignore_index)
    return loss + z_loss, z_loss.detach()


def fused_cross_entropy_module(
    module: Any, input: torch.Tensor, target: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Replace `FusedCrossEntropyLoss.forward`, which asserts that there is an accelerator."""
    loss, z_loss = cross_entropy_loss(
        input,
        target,
        label_smoothing=module.label_smoothing,
        logit_scale=module.logit_scale,
        lse_square_scale=module.lse_square_scale,
        logit_softcapping=module.logit_softcapping,
        ignore_index=module.ignore_index,
        process_group=module.process_group,
    )
    if module.reduction != "none":
        count = (target != module.ignore_index).sum() if module.reduction == "mean" else 1
        loss, z_loss = loss.sum() / count, z_loss.sum() / count
    return (loss, z_loss) if module.return_z_loss else loss


def fused_linear_cross_entropy_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the cross entropy of `x weight^T + bias` [N, V], the mean or sum over the targets that are not ignored.

    `num_chunks` and `accumulate_grad_in_fp32` have no effect, since one product computes the logits of all tokens.
    """
    from fla.modules.l2warp import l2_warp  # FLA is imported already if this is called

    logits = F.linear(x, weight, bias)
    loss, _ = cross_entropy_loss(
        logits,
        target,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        logit_softcapping=logit_softcapping,
        ignore_index=ignore_index,
        process_group=process_group,
    )
    loss = loss.sum()
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum().clamp_min(1)
    return l2_warp(loss, logits.unsqueeze(0), l2_penalty_factor) if use_l2warp else loss
