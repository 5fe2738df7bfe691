"""DDP: replicate the model on each rank and sum gradients during the backward. Start at `apply_ddp`.

This module uses torch's composable DDP, which does not wrap the model: parameter names, state dicts and methods stay. Unlike
with `DistributedDataParallel`, gradients are summed instead of averaged; graphs of compiled blocks are not split unless
`split_compiled_blocks` is set; buffers are broadcast once, or before each training forward with `broadcast_buffers`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanplans.config import DDPConfig
from titanplans.errors import ParallelError
from titanplans.parallel.mesh.degrees import NOT_FOR_DDP
from titanplans.precision.autocast import apply_autocast
from titanplans.text import class_name
from titanplans.torch_private.compile import is_compiled_model
from titanplans.torch_private.ddp import DDP, has_static_graph, hide_ddp_from_compiler, replicate, start_ddp
from titanplans.torch_private.dispatch import tree_leaves


def apply_ddp(model: nn.Module, mesh: DeviceMesh, config: DDPConfig) -> None:
    """Replicate `model` over `mesh`, in place. Collective: rank 0 broadcasts parameters and buffers.

    Gradients are summed in their own dtype. The optimizer may be built before or after this call. Afterwards no parameter
    may be replaced, moved or cast.

    Args:
        model: materialised, on the mesh's device; activation checkpointing and compile are already applied, if at all.
        mesh: 1-D: the ranks whose gradients are summed, data-parallel and, if there are any, context-parallel.
        config: the options of DDP and autocast.

    Raises:
        ParallelError: the model can't be replicated. Raised before any communication.
    """
    refuse_model(model, mesh)
    group = mesh.get_group()
    if config.autocast_dtype is not None:
        apply_autocast(model, mesh.device_type, getattr(torch, config.autocast_dtype))
    _broadcast(group, model)
    if config.broadcast_buffers:
        model.register_forward_pre_hook(partial(_broadcast_in_training, group))
    if config.find_unused_parameters or config.static_graph:
        model.register_forward_hook(_refuse_hidden_outputs)
    replicate(
        model,
        process_group=group,
        bucket_cap_mb=config.bucket_cap_mb,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
    )
    assert isinstance(model, DDP)
    # The loss is divided by the tokens of the global batch, so gradients have to be summed. torch's reducer averages them,
    # so each gradient is first multiplied by the number of ranks. A communication hook that sums would be wrong for
    # gradients that are reduced twice before a step: every rank holds the first sum, and the second reduction would add up
    # these copies.
    if mesh.size() > 1:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(torch.mul, other=mesh.size()))
    # Broadcast now, not in the first forward: a copy of the parameters that is made before the first forward must have
    # rank 0's values.
    start_ddp(model)
    # Blocks are compiled one by one, so their gradients are reduced during the backward of earlier blocks without torch's
    # DDPOptimizer, which would also split the graphs of a block.
    if not config.split_compiled_blocks:
        model.register_forward_pre_hook(hide_ddp_from_compiler)
    model.register_forward_hook(hide_ddp_from_compiler, always_call=True)


@contextmanager
def accumulate(model: nn.Module, *, last: bool, defer: bool = True) -> Iterator[None]:
    """Run the forward and backward of one micro batch; gradients are complete after the last one's backward.

    Args:
        model: replicated by `apply_ddp`.
        last: whether this is the last micro batch before the optimizer's step.
        defer: True: sum gradients only in the last micro batch's backward. False: sum them in every backward.

    Raises:
        ParallelError: `model` is not replicated by DDP, or it has a static graph, with which gradients can't be deferred.
    """
    if not isinstance(model, DDP):
        raise ParallelError(f"{class_name(model)} is not replicated by DDP: call apply_ddp first")
    if defer and not last and has_static_graph(model):
        raise ParallelError(
            "ddp.static_graph = true: torch's reducer can't defer gradients to a later micro batch; set it to false, or set "
            "defer_grad_sync to false"
        )
    model.set_requires_gradient_sync(last or not defer)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def refuse_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a model that DDP can't replicate over `mesh`.

    Raises:
        ParallelError: `model` is split, already replicated, compiled as one module, fully frozen, on meta or on another
            device.
    """
    ddp = f"ddp of {class_name(model)}"
    why = ""
    if isinstance(model, DDP):
        why = "it is already replicated by DDP; remove the second call"
    elif is_compiled_model(model):
        why = "it is compiled as one module, and the reducer's hooks stay outside of a graph; compile its blocks one by one"
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        why = "all parameters are frozen, so there is no gradient to sum; leave DDP out"
    if why:
        raise ParallelError(f"{ddp}: {why}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            axes = tensor.device_mesh.mesh_dim_names
            raise ParallelError(f"ddp with {name} split over the mesh {axes}: {NOT_FOR_DDP}")
        if tensor.device.type != mesh.device_type:
            raise ParallelError(
                f"{ddp}: {name} is on {tensor.device} and the mesh on {mesh.device_type}; move the model there first, "
                "or give it values if it is on meta, since DDP sends rank 0's values to all ranks"
            )


def _broadcast(group: dist.ProcessGroup, model: nn.Module) -> None:
    with torch.no_grad():
        for buffer in model.buffers():
            dist.broadcast(buffer, group=group, group_src=0)


def _broadcast_in_training(group: dist.ProcessGroup, model: nn.Module, inputs: Any) -> None:
    if model.training and torch.is_grad_enabled():
        _broadcast(group, model)


def _refuse_hidden_outputs(model: nn.Module, inputs: Any, output: Any) -> None:
    """Refuse outputs in which torch finds no tensor: it would treat every parameter as unused and reduce no gradient."""
    if torch.is_grad_enabled() and not any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)
    ):
        raise ParallelError(
            f"ddp with find_unused_parameters or static_graph needs tensors in the output of {class_name(model)}, and finds "
            f"none in a {type(output).__name__}: return a tensor, tuple, dict or ModelOutput, or set both to false"
        )
