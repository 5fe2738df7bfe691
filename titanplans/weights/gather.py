"""`gather`: gather the full tensors of a split model one at a time, on the CPU of rank 0.

The mesh may have any dimensions (TP, FSDP2, replicas), and shards may be uneven or strided.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.errors import ModelError
from titanplans.split.objects import gather_objects, rank
from titanplans.weights.lazy import LazyTensor, lazy_tensors


@torch.no_grad()
def gather(
    model: nn.Module, *, only: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the full tensor of each parameter and persistent buffer; tied tensors only under their first
    name.

    Collective: every rank must iterate over all of them. Rank 0 gets tensors on the CPU, the others get tensors on meta.
    Each rank needs memory for one full tensor on the model's device.

    Args:
        model: a split or unsplit model.
        only: takes a name, and returns whether to gather its tensor; has to be the same on every rank.

    Raises:
        ModelError: a value of the state dict is not a tensor, or a tensor is on meta.
    """
    for name, tensor in refuse_meta(state_tensors(model)[0]).items():
        if only(name):
            yield name, gather_full_tensor(tensor)


def state_tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of the state dict, and the tied names.

    Returns:
        tensors: the tensors by name, tied tensors only by their first name. They share memory with the model.
        tied: the first name of a tied tensor, by each of its other names.
    """
    first_names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    # keep_vars: tied parameters are recognised by their id, which detached copies do not share.
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"{name} in the state dict is a {type(value).__name__}, but only tensors can be gathered and loaded"
            )
        first = first_names.setdefault(id(value), name)
        if first == name:
            tensors[name] = value.detach()
        else:
            tied[name] = first
    return tensors, tied


def refuse_meta(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors`; raise a ModelError if one of them is on meta."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ModelError(f"{name} is on meta and has no values: load or initialise the model first")
    return tensors


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor: return a copy on the CPU on rank 0, and a tensor on meta on the others. Collective."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if rank() != 0:
        return torch.empty(full.shape, dtype=full.dtype, device="meta")
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = full.untyped_storage()
    # A copy is needed if `full` shares memory with the model, as a replicated tensor does, or is a view of a larger
    # tensor, which the all-gather has padded.
    is_view = storage.data_ptr() == local.untyped_storage().data_ptr() or storage.nbytes() != full.nbytes
    return full.to("cpu", copy=is_view).contiguous()


def gather_from_stages(models: Sequence[nn.Module], group: dist.ProcessGroup) -> dict[str, LazyTensor]:
    """Return the full tensors of a model whose pipeline stages are on several ranks. Values arrive on rank 0's CPU.

    Reading is collective: every rank must read all tensors in the same order. If several stages hold a tensor, it is read
    from the first of these stages.

    Args:
        models: the stages of this rank.
        group: the process group of this rank's pipeline; global rank 0 is the first of its group.
    """
    local_tensors = {
        name: tensor for model in models for name, tensor in refuse_meta(state_tensors(model)[0]).items()
    }
    meta_tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in local_tensors.items()
    }
    meta_by_rank = gather_objects(meta_tensors, group)
    # Later entries replace earlier ones, so iterate in reverse to keep the first rank that holds a tensor.
    holder = {name: index for index in reversed(range(group.size())) for name in meta_by_rank[index]}
    tensors = {name: meta for metas in meta_by_rank for name, meta in metas.items()}
    has_rank_0 = dist.get_process_group_ranks(group)[0] == 0

    def read(name: str) -> torch.Tensor:
        index, meta = holder[name], tensors[name]
        if index == 0:
            return gather_full_tensor(local_tensors[name]) if group.rank() == 0 else meta
        if group.rank() == index:
            tensor = local_tensors[name]
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if has_rank_0:  # only the pipeline of rank 0 sends, since the others have the same tensors
                dist.send(full.contiguous(), group=group, group_dst=0)
        elif rank() == 0:
            device = next(models[0].parameters()).device
            full = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            dist.recv(full, group=group, group_src=index)
            return full.cpu()
        return meta

    return lazy_tensors(tensors, read)
