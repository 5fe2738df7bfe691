"""Whole tensors of a split model, one after the other, on the CPU of rank 0.

The mesh may have any dimensions (tensor parallelism, FSDP2 over it, replicas of both), and shards may be uneven or strided.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.errors import ModelError
from titanplans.split.objects import gather_objects, rank
from titanplans.weights.lazy import LazyTensor, lazily


@torch.no_grad()
def gather(
    model: nn.Module, *, only: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and whole tensor of each parameter and persistent buffer; a tied one once, by its first name.

    Collective: each rank goes through all of them. In a step each rank has one whole tensor on the model's device, and
    rank 0 has it on the CPU; the others get a tensor on meta.

    Args:
        model: split, sharded, replicated or whole.
        only: which names; the same on every rank.

    Raises:
        ModelError: something in the state dict is no tensor, or has no values yet.
    """
    for name, tensor in with_values(stored(model)[0]).items():
        if only(name):
            yield name, whole(tensor)


def stored(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of the state dict, a tied one by its first name alone; and that name by each of its others.

    They are the model's own memory: writing into them changes the model.
    """
    first: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"{name} in the state dict is a {type(value).__name__}, and only tensors are gathered and loaded"
            )
        known = first.setdefault(id(value), name)
        if known == name:
            tensors[name] = value.detach()
        else:
            tied[name] = known
    return tensors, tied


def with_values(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors`; refuse those on meta."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ModelError(f"{name} is on meta and has no values: load or initialise the model first")
    return tensors


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of `tensor`: on rank 0 a copy on the CPU, elsewhere a tensor on meta. Collective."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if rank() != 0:
        return torch.empty(full.shape, dtype=full.dtype, device="meta")
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    there = full.untyped_storage()
    # A replica is the model's own memory. A tensor that was padded to be gathered is a view of a larger one.
    is_view = there.data_ptr() == local.untyped_storage().data_ptr() or there.nbytes() != full.nbytes
    return full.to("cpu", copy=is_view).contiguous()


def of_stages(models: Sequence[nn.Module], group: dist.ProcessGroup) -> dict[str, LazyTensor]:
    """Return the tensors of a model whose pipeline stages are on several ranks; reading one gives it whole on rank 0's CPU.

    Collective: each rank reads all of them, in one order. What several stages hold is read of the first.

    Args:
        models: the stages of this rank.
        group: the ranks of its pipeline; the one with rank 0 has it first.
    """
    own = {name: tensor for model in models for name, tensor in with_values(stored(model)[0]).items()}
    metas = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in own.items()
    }
    described = gather_objects(metas, group)
    holder = {name: at for at in reversed(range(group.size())) for name in described[at]}
    tensors = {name: meta for metas in described for name, meta in metas.items()}
    to_rank_0 = dist.get_process_group_ranks(group)[0] == 0

    def read(name: str) -> torch.Tensor:
        at, meta = holder[name], tensors[name]
        if at == 0:
            return whole(own[name]) if group.rank() == 0 else meta
        if group.rank() == at:
            tensor = own[name]
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if to_rank_0:
                dist.send(full.contiguous(), group=group, group_dst=0)
        elif rank() == 0:
            device = next(models[0].parameters()).device
            full = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            dist.recv(full, group=group, group_src=at)
            return full.cpu()
        return meta

    return lazily(tensors, read)
