"""DDP: a whole model on each rank, whose gradients are summed during the backward.

This is torch's C++ reducer in its composable form: the model is not wrapped, so parameter names, state dicts and
the model's own methods stay as they are. Three things differ from torch's DDP:

- Gradients are summed, not averaged, because the loss is divided by the tokens of the whole batch. The reducer
  averages, so each gradient is first multiplied by the number of ranks. A reducer that sums would be wrong where
  gradients are reduced twice before a step: each rank would add the first sum once more.
- Blocks are compiled one by one, before DDP, and their gradients are summed while earlier blocks run their backward.
  torch's DDPOptimizer, which also cuts graphs inside a block, runs only with `split_compiled_blocks`.
- Buffers take rank 0's values once; with `broadcast_buffers` before each forward in training.
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
from titanplans.torch_private.compile import is_compiled_whole
from titanplans.torch_private.ddp import DDP, has_static_graph, hide_ddp_from_compiler, replicate, start_ddp
from titanplans.torch_private.dispatch import tree_leaves


def apply_ddp(model: nn.Module, mesh: DeviceMesh, config: DDPConfig) -> None:
    """Replicate `model` over `mesh`, in place. Collective: parameters and buffers take rank 0's values.

    Gradients are summed in their own dtype. Build the optimizer before or after; but no parameter may be
    replaced, moved or cast from here on.

    Args:
        model: with its values, on the mesh's device; recomputed and compiled block by block, if at all, before this.
        mesh: 1-D: the ranks that read different data.
        config: the options; recomputation and compile have been applied already.

    Raises:
        ParallelError: the model can't be replicated. Before anything is sent.
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
    if mesh.size() > 1:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(torch.mul, other=mesh.size()))
    # Now, not in the first forward: a copy of the parameters taken before it must hold rank 0's values.
    start_ddp(model)
    if not config.split_compiled_blocks:
        model.register_forward_pre_hook(hide_ddp_from_compiler)
    model.register_forward_hook(hide_ddp_from_compiler, always_call=True)


@contextmanager
def accumulate(model: nn.Module, *, last: bool, defer: bool = True) -> Iterator[None]:
    """Run forward and backward of one micro batch; gradients are whole after the last one's backward.

    Args:
        model: a model that `apply_ddp` was given.
        last: whether this is the last micro batch before the optimizer's step.
        defer: sum gradients in the last micro batch's backward alone, not in each.

    Raises:
        ParallelError: `model` is not replicated by DDP, or with a static graph, which can't defer.
    """
    if not isinstance(model, DDP):
        raise ParallelError(f"{class_name(model)} is not replicated by DDP: call apply_ddp first")
    if defer and not last and has_static_graph(model):
        raise ParallelError(
            "ddp.static_graph = true: torch loses count of gradients that wait for another micro batch; set it to false, or "
            "defer nothing"
        )
    model.set_requires_gradient_sync(last or not defer)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def refuse_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a model that DDP can't replicate over `mesh`.

    Raises:
        ParallelError: it is split, replicated, compiled as a whole, frozen, on meta or on another device.
    """
    ddp = f"ddp of {class_name(model)}"
    why = ""
    if isinstance(model, DDP):
        why = "it is already replicated by DDP; remove the second call"
    elif is_compiled_whole(model):
        why = "it is compiled as a whole, and the reducer's hooks stay outside of a graph; compile its blocks one by one"
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
                f"{ddp}: {name} is on {tensor.device} and the mesh on {mesh.device_type}; move the model there first, or "
                "from meta give it values, since DDP sends rank 0's to all"
            )


def _broadcast(group: dist.ProcessGroup, model: nn.Module) -> None:
    with torch.no_grad():
        for buffer in model.buffers():
            dist.broadcast(buffer, group=group, group_src=0)


def _broadcast_in_training(group: dist.ProcessGroup, model: nn.Module, inputs: Any) -> None:
    if model.training and torch.is_grad_enabled():
        _broadcast(group, model)


def _refuse_hidden_outputs(model: nn.Module, inputs: Any, output: Any) -> None:
    """Refuse outputs in which torch finds no tensor: it would take every parameter for unused, and sum nothing."""
    if torch.is_grad_enabled() and not any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)
    ):
        raise ParallelError(
            f"ddp with find_unused_parameters or static_graph looks for tensors in what {class_name(model)} returns, and "
            f"finds none in a {type(output).__name__}: return a tensor, tuple, dict or ModelOutput, or set both to false"
        )
