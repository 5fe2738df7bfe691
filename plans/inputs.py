"""What a split model is called with: arguments that it would misread are completed, or refused.

A split model looks like the whole one from outside, but its body sees shards: of the sequence
between the regions, of the vocabulary at the head. Where a model's own code draws a conclusion from
those, it is given the right value from here, or the call is refused.
"""

import inspect
from functools import partial

import torch
from torch import nn

from plans.errors import PlanError


def guard_inputs(model: nn.Module, *, loss_parallel: bool, sequence_dim: int | None) -> None:
    """Put a hook before `model`'s forward.

    Args:
        model: the split model, called with token ids as `input_ids` or as the first argument.
        loss_parallel: the logits are sharded over the vocabulary.
        sequence_dim: the dimension in which the sequence is sharded between regions; None if it is not.
    """
    fused_loss = getattr(getattr(model, "config", None), "fuse_linear_cross_entropy", False)
    own_loss = not loss_parallel and not fused_loss
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    model.register_forward_pre_hook(
        partial(_guard, own_loss, sequence_dim, takes_positions), with_kwargs=True
    )


def _guard(own_loss: bool, sequence_dim: int | None, takes_positions: bool, model: nn.Module, args, kwargs):
    if not own_loss and kwargs.get("labels") is not None:
        raise PlanError(
            f"{type(model).__name__} was called with labels, but its logits or its head are sharded over the vocabulary, "
            "where its own loss is wrong: compute the loss from the logits, or set loss_parallel = False "
            "and fuse_linear_cross_entropy = False"
        )
    if sequence_dim is None:
        return None
    kept = kwargs.get("logits_to_keep") or kwargs.get("num_logits_to_keep")
    if kept is not None and not (isinstance(kept, int) and kept == 0):
        raise PlanError(
            f"{type(model).__name__} was called with logits_to_keep = {kept}, which would keep that many tokens of each "
            "rank's shard: take the last logits from the output, or set sequence_parallel = False"
        )
    tokens = args[0] if args else kwargs.get("input_ids")
    if takes_positions and kwargs.get("position_ids") is None and tokens is not None:
        # It would count its positions in the embedding's output, which is a shard of the sequence.
        positions = torch.arange(tokens.shape[sequence_dim], device=tokens.device).unsqueeze(1 - sequence_dim)
        return args, {**kwargs, "position_ids": positions}
    return None
