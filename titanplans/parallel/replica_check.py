"""Check that every rank built a model with the same values, before it is split."""

import torch
import torch.distributed as dist
from torch import nn

from titanplans.errors import ParallelError
from titanplans.split.checksum import PRIME, checksum
from titanplans.text import some


def check_equal_values(model: nn.Module, device: torch.device) -> None:
    """Check that parameters and buffers of `model` are equal on every rank; tensors on meta are skipped.

    FSDP and tensor parallelism take each rank's shard from that rank's values, so shards of different values would not form
    one model. Collective over all ranks: one all-reduce of the number of tensors, and one of two checksums per tensor (of
    its shape, and of its bytes weighted by position).

    Args:
        model: not yet parallelised.
        device: where collectives run.

    Raises:
        ParallelError: the values, or the numbers of tensors, differ; the error names the tensors.
    """
    if dist.get_world_size() == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    named = {name: tensor for name, tensor in tensors if not tensor.is_meta}
    # The maxima of x and of -x are opposite only if x is the same on all ranks: one all-reduce compares them.
    count = torch.tensor([len(named), -len(named)], device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    if count[0] != -count[1]:
        raise ParallelError(
            f"the ranks' models have {-count[1]} to {count[0]} tensors with values: build the same model on every rank"
        )
    if not named:
        return
    sums = torch.tensor([_checksums(tensor) for tensor in named.values()], device=device)
    both = torch.stack([sums, -sums])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    differ = (both[0] != -both[1]).any(-1).tolist()
    if any(differ):
        names = [name for name, differs in zip(named, differ, strict=True) if differs]
        raise ParallelError(
            f"ranks hold different values of {some(names)}: build the model on meta, load the same weights, "
            "or call torch.manual_seed with the same seed on every rank before it is built"
        )


def _checksums(tensor: torch.Tensor) -> list[int]:
    return [hash(tuple(tensor.shape)) % PRIME, checksum(tensor)]
