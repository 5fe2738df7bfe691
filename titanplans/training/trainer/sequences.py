"""Context parallelism in torchtitan's trainer: each rank of a group reads whole sequences, and has a part of their loss.

torchtitan's own cuts ids, labels and positions before the model, for its own attention. Here the model cuts them, so that
what torchtitan counts by the labels of a rank (tokens, the mean loss of a batch) it would count once a rank of the group.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titanplans.torch_private.swapped import swapped


class WholeSequences(ParallelDims):
    """torchtitan's, for whose trainer and validator there is nothing to cut by tokens."""

    @property
    def cp_enabled(self) -> bool:
        """False: asked where ids and labels are cut."""
        return False

    def get_optional_mesh(self, dims: str | list[str], **options: Any) -> DeviceMesh | None:
        """torchtitan's; None for "pp", by which it would give stages other seeds, and clip."""
        return None if dims == "pp" else super().get_optional_mesh(dims, **options)

    def get_mesh(self, dims: str | list[str]) -> DeviceMesh:
        """torchtitan's, "pp" included."""
        mesh = super().get_optional_mesh(dims)
        return super().get_mesh(dims) if mesh is None else mesh

    @property
    def dp_cp_enabled(self) -> bool:
        """Whether several ranks have a part of the loss."""
        return self.dp_enabled or self.cp > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether several ranks have a part of each weight."""
        return self.dp_shard_enabled or self.cp > 1


def whole_batches(dims: ParallelDims) -> AbstractContextManager[None]:
    """Let torchtitan's `train_step` find the largest of the batches' mean losses, and not of their parts.

    It calls `torchtitan.distributed.utils.dist_max`, which is replaced only while the body runs.
    """
    if dims.cp == 1:
        return nullcontext()
    largest, group = dist_utils.dist_max, dims.get_mesh("cp").get_group()

    def of_batches(x: torch.Tensor, *args: Any, **kwargs: Any) -> float:
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return largest(whole, *args, **kwargs)

    return swapped(dist_utils, "dist_max", of_batches)
