"""The arguments of a split model's forward: those that its own code would misread are refused.

A split model looks like the whole one from outside, but its body sees shards: of the sequence
between the regions, of the vocabulary at the head. Where the model's code draws a conclusion from what would be a
shard, either the stream begins after that, at the first block, or the call is refused.
"""

from functools import partial

from torch import nn

from titanplans.errors import PlanError
from titanplans.tensor_parallel.stream import Border


def guard_inputs(
    model: nn.Module, border: Border, *, loss_parallel: bool, begins_at: nn.Module | None
) -> None:
    """Put hooks before the forward of `model`, and of the block at which the stream begins.

    Args:
        model: the split model.
        border: that of its residual stream.
        loss_parallel: the logits are sharded over the vocabulary.
        begins_at: the first block, if each rank takes its shard of the sequence at its entry: everything before it sees the
            whole sequence, so what a model derives from its embeddings (positions, masks, the places of images) is right.
            None if the stream begins at the embedding, which `inputs_embeds` would bypass, or is not sharded.
    """
    if begins_at is not None:
        begins_at.register_forward_pre_hook(partial(_begin, border), with_kwargs=True)
    fused_loss = getattr(getattr(model, "config", None), "fuse_linear_cross_entropy", False)
    own_loss = not loss_parallel and not fused_loss
    sharded = border.stream.dim is not None
    model.register_forward_pre_hook(
        partial(_guard, own_loss, sharded, sharded and begins_at is None), with_kwargs=True
    )


def _begin(border: Border, block: nn.Module, args, kwargs):
    if args:
        return (border.begin(args[0]), *args[1:]), kwargs
    name = next((name for name in ("hidden_states", "x") if name in kwargs), None)
    if name is None:
        raise PlanError(
            f"{type(block).__name__}, the first block, was called without a positional input and without 'hidden_states' "
            f"(got {', '.join(kwargs) or 'nothing'}): set sequence_parallel = False"
        )
    return args, {**kwargs, name: border.begin(kwargs[name])}


def _guard(own_loss: bool, sharded: bool, begins_at_embedding: bool, model: nn.Module, args, kwargs):
    if not own_loss and kwargs.get("labels") is not None:
        raise PlanError(
            f"{type(model).__name__} was called with labels, but its logits or its head are sharded over the vocabulary, "
            "where its own loss is wrong: compute the loss from the logits, or set loss_parallel = False "
            "and fuse_linear_cross_entropy = False"
        )
    kept = kwargs.get("logits_to_keep") or kwargs.get("num_logits_to_keep")
    if sharded and kept is not None and not (isinstance(kept, int) and kept == 0):
        raise PlanError(
            f"{type(model).__name__} was called with logits_to_keep = {kept}, which would keep that many tokens of each "
            "rank's shard: take the last logits from the output, or set sequence_parallel = False"
        )
    if begins_at_embedding and kwargs.get("inputs_embeds") is not None:
        raise PlanError(
            f"{type(model).__name__} was called with inputs_embeds, but its plan lets the sharded stream begin at the "
            "embedding: call it with input_ids, or give the plan vocab_embedding() without begins_stream"
        )
