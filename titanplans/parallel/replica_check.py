"""The check that every rank built a model with the same values, before it is split."""

import torch
import torch.distributed as dist
from torch import nn

from titanplans.errors import ParallelError

_PIECE = 2**24
"""Bytes that are summed at a time."""
_PRIME = 2**61 - 1
"""A sum modulo a power of two would lose its highest bits, such as the sign of a number."""


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
    sums = torch.tensor([_checksum(tensor) for tensor in named.values()], device=device)
    both = torch.stack([sums, -sums])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    differ = (both[0] != -both[1]).any(-1).tolist()
    if any(differ):
        names = [name for name, other in zip(named, differ, strict=True) if other]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ParallelError(
            f"ranks hold different values of {', '.join(names[:3])}{more}: build the model on meta, load the same weights, "
            "or call torch.manual_seed with one number on every rank before it is built"
        )


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> list[int]:
    """Return a number of the shape, and the sum of all 8-byte words, each times an odd number of its place; 61 bits."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        # A copy, of whole words: a tensor may begin between two.
        words = torch.nn.functional.pad(piece, (0, -len(piece) % 8)).clone().view(torch.int64)
        place = torch.arange(start // 8, start // 8 + len(words), device=words.device) * 2 + 1
        total += int(words.mul_(place).sum())
    return [hash(tuple(tensor.shape)) % _PRIME, total % _PRIME]
