"""The check that every rank built a model with the same values, before it is split."""

import torch
import torch.distributed as dist
from torch import nn

from titanplans.errors import ParallelError
from titanplans.split.checksum import PRIME, checksum
from titanplans.text import some


def check_equal_values(model: nn.Module, device: torch.device) -> None:
    """Check that parameters and buffers of `model` are the same on every rank; tensors on meta are passed over.

    FSDP and tensor parallelism keep each rank's part of that rank's own values. If ranks start from different values,
    the parts do not belong to one model. Collective over all ranks: one all-reduce of two checksums a tensor, of its
    shape and of its bytes, weighted by their place.

    Args:
        model: whole, not yet parallelised.
        device: where collectives run.

    Raises:
        ParallelError: names what differs.
    """
    if dist.get_world_size() == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    named = {name: tensor for name, tensor in tensors if not tensor.is_meta}
    number = torch.tensor([len(named), -len(named)], device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    if number[0] != -number[1]:
        raise ParallelError(
            f"ranks have models of {-number[1]} to {number[0]} tensors with values: build the same model on every rank"
        )
    if not named:
        return
    sums = torch.tensor([_of_shape_and_bytes(tensor) for tensor in named.values()], device=device)
    both = torch.stack([sums, -sums])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    differ = (both[0] != -both[1]).any(-1).tolist()
    if any(differ):
        names = [name for name, other in zip(named, differ, strict=True) if other]
        raise ParallelError(
            f"ranks hold different values of {some(names)}: build the model on meta, load the same weights, "
            "or call torch.manual_seed with one number on every rank before it is built"
        )


def _of_shape_and_bytes(tensor: torch.Tensor) -> list[int]:
    return [hash(tuple(tensor.shape)) % PRIME, checksum(tensor)]
