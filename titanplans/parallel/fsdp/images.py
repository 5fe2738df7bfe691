"""Check that each forward has images on all FSDP ranks or on none."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from titanplans.config import FSDP2Config
from titanplans.split.arguments import positional
from titanplans.torch_private.dispatch import has_dispatch_mode

_FOR_TOWERS = ("pixel", "image", "video", "vision", "audio", "feature")
"""Substrings in the names of arguments of a forward that are inputs of a vision or audio tower."""


def check_images(model: nn.Module, mesh: DeviceMesh, config: FSDP2Config) -> RemovableHandle:
    """Check before each forward of `model` that either all ranks of `mesh` pass images to it, or none does.

    Only ranks with images run a tower, and all-gather its FSDP units. A rank without images continues with the units of
    the decoder, and its collectives would be matched with the other ranks' collectives of the tower: they would hang, or
    exchange wrong tensors.

    The check is an all-reduce of two integers per mesh dimension, for which the host waits. Images are recognised by the
    name of the argument.

    Returns:
        The handle that removes the check, for a loop that never passes images.
    """

    def check(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or has_dispatch_mode():
            return
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
        has_images = any(
            value is not None and any(word in name for word in _FOR_TOWERS)
            for name, value in arguments.items()
        )
        # The maxima of x and of -x are opposite only if x is the same on all ranks.
        both = torch.tensor([int(has_images), -int(has_images)], device=device)
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
