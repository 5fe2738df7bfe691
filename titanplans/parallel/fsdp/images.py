"""Images on some ranks of FSDP and none on others: found out before the ranks wait for each other.

A tower whose blocks are units of FSDP is gathered by those who run it. A rank whose batch has no image goes on to the
decoder's units, and its collectives meet the tower's of another rank: they hang, or mix up their tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from titanplans.config import FSDP2Config
from titanplans.split.arguments import positional
from titanplans.torch_private.dispatch import dispatch_is_watched

_FOR_TOWERS = ("pixel", "image", "video", "vision", "audio", "feature")
"""In the names of arguments that a tower sees, in transformers' models and others."""


def check_images(model: nn.Module, mesh: DeviceMesh, config: FSDP2Config) -> RemovableHandle:
    """Check, before each forward of `model`, that every rank of `mesh` gives it images, or none does.

    One all-reduce of two numbers, for which the host waits. An image is an argument of the forward that is called so.

    Returns:
        The handle that takes the check away, for a loop that never gives images.
    """

    def check(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or dispatch_is_watched():
            return
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        sees = any(
            value is not None and any(word in name for word in _FOR_TOWERS) for name, value in given.items()
        )
        both = torch.tensor([int(sees), -int(sees)], device=device)
        for dim in range(mesh.ndim):
            dist.all_reduce(both, dist.ReduceOp.MAX, mesh.get_group(dim))
        if both[0] != -both[1]:
            raise config.error(
                "fsdp_towers",
                "some ranks' batches have images and others' have none, so only some would gather the tower's blocks: "
                'set fsdp_towers = "root", or give every rank an image in each forward',
            )

    names = positional(model)
    device = torch.empty(0, device=mesh.device_type).device
    return model.register_forward_pre_hook(check, prepend=True, with_kwargs=True)
