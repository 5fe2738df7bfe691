"""Cross entropy of logits that may be sharded over the vocabulary, as every loop here needs it: a sum over
tokens, divided by the tokens of the whole batch, so that gradients are summed over ranks and micro batches.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanplans.errors import ModelError, ParallelError, either
from titanplans.tensor_parallel.collectives import Group, all_reduce, group_of, shard_size
from titanplans.torch_private import assert_async

IGNORED = -100
"""The label of a token that does not count: torch's default."""


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of this rank's tokens, in nats, divided by `tokens`; a plain scalar, float32 or wider.

    Summed over ranks with other data, and over micro batches, it is the mean over the whole batch.

    Logits that are sharded over the vocabulary stay so: three all-reduces of a number per token, of the
    maximum, of the sum of exponentials and of the label's logit (Megatron-LM, arXiv 1909.08053, section 3);
    the backward communicates nothing.

    Args:
        logits: [..., vocabulary]; a tensor, or a DTensor on a 1-D mesh, replicated or `Shard(-1)`, evenly or not.
        labels: [...], token ids; -100 where a token does not count. The same on all ranks of the logits' mesh.
        tokens: how many count in the whole batch: see `count_tokens`.

    Raises:
        ParallelError: the shapes don't match, or the logits have another placement.
    """
    if logits.shape[:-1] != labels.shape:
        raise ParallelError(
            f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}: one label for each "
            "position, the next token's"
        )
    shard: tuple[Any, ...] | None = None
    vocabulary = logits.shape[-1]
    if isinstance(logits, DTensor):
        placement, mesh = logits.placements[0], logits.device_mesh
        if mesh.ndim != 1 or not (placement.is_replicate() or placement.is_shard(logits.ndim - 1)):
            raise ParallelError(
                f"logits with placements {logits.placements}: whole, or sharded over the vocabulary of a 1-D mesh"
            )
        if placement.is_shard():
            size = shard_size(vocabulary, mesh.size())
            # By `narrow`, not by arithmetic on the rank: it also differs between ranks that one process simulates.
            firsts = torch.arange(mesh.size(), device=labels.device) * size
            group: Group = group_of(mesh)
            shard = firsts.narrow(0, mesh.get_local_rank(), 1), size, vocabulary, group
        logits = logits.to_local()
    flat = logits.flatten(0, -2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    if shard is None:
        total = torch.nn.functional.cross_entropy(
            flat, labels.reshape(-1), reduction="sum", ignore_index=IGNORED
        )
    else:
        total = cast(torch.Tensor, _Sharded.apply(flat, labels.reshape(-1), *shard))
    return total / tokens


_WEIGHTS = ("router_aux_loss_coef", "aux_loss_scale")
"""Under these names configs keep the weight of the balance of routers."""
_EXPERTS = ("num_experts", "num_local_experts", "num_memories")
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "topk")


def added_loss(model: nn.Module, output: Any) -> torch.Tensor | None:
    """Return what `model` adds to the mean cross entropy of its batch: its routers' balance, weighted; a scalar or None.

    A model returns it as `aux_loss`, and its config holds the weight. One that returns its routers' logits, and computes
    their balance beside its own loss alone, gets it by the function of its file that does so.

    Raises:
        ModelError: it returns another loss, or an `aux_loss` without a weight: training would leave it out.
    """
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    given = {name: x for name, x in fields.items() if name.endswith("_loss") and isinstance(x, torch.Tensor)}
    balance, kind = given.pop("aux_loss", None), type(model).__name__
    if given:
        raise ModelError(
            f"{kind} returns {next(iter(given))}, which nothing adds to the loss: let it return aux_loss, weighted by "
            f"{either(_WEIGHTS)} of its config"
        )
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = _first(config, _WEIGHTS)
    if balance is not None:
        if weight is None:
            raise ModelError(
                f"{kind} returns aux_loss, but its config has no weight of it: {either(_WEIGHTS)}"
            )
        return weight * balance
    # This rank's, where the model is split.
    function = getattr(type(model).forward, "__globals__", {}).get("load_balancing_loss_func")
    if weight and function is not None and (logits := fields.get("router_logits")):
        return weight * function(logits, _first(config, _EXPERTS), _first(config, _EXPERTS_A_TOKEN))
    return None


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """Return the first field of `config` under one of `names`, or None."""
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)


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
    """The sum of cross entropies of logits [tokens, share of the vocabulary], of which this rank's begin at `first` [1].

    A share has `size` columns, on the last ranks fewer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        first: torch.Tensor,
        size: int,
        vocabulary: int,
        group: Group,
    ) -> torch.Tensor:
        width = logits.shape[-1]
        # A rank may hold none of the vocabulary.
        largest = logits.amax(-1) if width else logits.new_full(labels.shape, -torch.inf)
        largest = all_reduce(largest, group, "max")
        exponentials = (logits - largest[:, None]).exp()
        counts = labels != IGNORED
        assert_async(
            (~counts | ((labels >= 0) & (labels < vocabulary))).all(), "a label outside of the vocabulary"
        )
        # Counted labels are below `vocabulary`: that the last shares have fewer columns needs no test.
        mine = counts & (labels >= first) & (labels < first + size)
        index = torch.where(mine, labels - first, 0)[:, None]
        own = (
            torch.where(mine, logits.gather(-1, index)[:, 0], 0) if width else logits.new_zeros(labels.shape)
        )
        total = all_reduce(exponentials.sum(-1), group)
        own = all_reduce(own, group)
        ctx.save_for_backward(exponentials.div_(total[:, None]), index, mine, counts)
        return torch.where(counts, total.log() + largest - own, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        if torch.is_grad_enabled():
            raise ParallelError(
                "the gradient of a cross entropy over logits that are sharded over the vocabulary can't be differentiated "
                "again (create_graph = True): split the model with loss_parallel = False"
            )
        probabilities, index, mine, counts = ctx.saved_tensors
        gradient = probabilities
        if gradient.shape[-1]:
            gradient = gradient.scatter_add(-1, index, -mine[:, None].to(gradient.dtype))
        return gradient * (grad * counts[:, None]), None, None, None, None, None
