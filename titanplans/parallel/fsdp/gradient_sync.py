"""When FSDP communicates outside of one plain step: over accumulated micro batches, and in evaluation.

Both are context managers that leave every flag as the model was sharded with, whatever happens inside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanplans.errors import ParallelError
from titanplans.parallel.fsdp.units import fsdp_module
from titanplans.precision.float8.scales import seek_scales
from titanplans.text import class_name
from titanplans.torch_private.fsdp import fsdp_group, settle_fsdp_root

Defer = Literal["all", "replicas", "nothing"]


@contextmanager
def accumulate(
    model: nn.Module, *, last: bool, defer: Defer = "all", keep_gathered: bool = False
) -> Iterator[None]:
    """Run forward and backward of one micro batch; gradients are whole after the last one's backward.

        for i, batch in enumerate(batches):
            with accumulate(model, last=i == len(batches) - 1):
                loss_of(model, batch).backward()

    Memory: with "all" every rank holds a whole copy of the gradients until the last backward, in
    `reduce_dtype` (4 bytes a parameter in float32), instead of one unit's; `keep_gathered` adds a whole
    copy of the parameters in `param_dtype`. "replicas" holds shards only.

    An exception inside drops the gradients of the whole step (`forget_gradients`), which a step that is given up
    between two micro batches has to do itself.

    Args:
        model: a model sharded by FSDP2, the root.
        last: whether this is the last micro batch before the optimizer's step.
        defer: what waits for the last micro batch. "all": every reduction, so that `.grad` is unchanged
            until then; "replicas": under HSDP, the sum over the copies, while shards are reduced at
            once; "nothing": gradients are summed in each backward. Only the last backward waits for its
            reductions: before it, `.grad` may be incomplete on a device with streams.
        keep_gathered: keep parameters gathered from one micro batch to the next, so that later forwards
            gather only the units that are freed between forward and backward.

    Raises:
        ParallelError: `model` is not sharded by FSDP, or is a part of a model that is, or `defer` can't be honoured.
    """
    root = _root(model)
    if defer not in ("all", "replicas", "nothing"):
        raise ParallelError(f"defer = {defer!r}: take 'all', 'replicas' or 'nothing'")
    if defer == "replicas" and not _is_replicated(model):
        raise ParallelError(
            "defer = 'replicas', and the model has one copy: give FSDP a 2-D mesh, or defer 'all'"
        )
    root.set_requires_gradient_sync(last or defer != "all")
    root.set_requires_all_reduce(last or defer == "nothing")
    root.set_reshard_after_backward(last or not keep_gathered)
    # The last reductions of an earlier micro batch overlap with the next forward.
    root.set_is_last_backward(last)
    try:
        yield
    except BaseException:
        forget_gradients(model)
        raise
    finally:
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)
        root.set_is_last_backward(True)
        for unit in _units(model):  # FSDP2 does so itself only where it waits
            _forget_forwards(fsdp_group(unit))


def forget_gradients(model: nn.Module) -> None:
    """Drop all gradients, also those that wait for the last micro batch, of a step that is given up before it.

    `zero_grad` sees the former alone: FSDP2 holds the latter outside of `.grad`, and would add them to the next step's.

    Args:
        model: a model sharded by FSDP2.
    """
    for unit in _units(model):
        _drop_waiting_gradients(fsdp_group(unit))
    model.zero_grad()


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather all parameters once, for any number of forwards without gradients; free them at the end.

    Afterwards, also if a forward raised, each unit frees the same parameters between forward and backward
    as before. Memory: a whole copy of the parameters in `param_dtype`. An optimizer's step or a state dict
    loaded inside would not be seen by the forwards; saving a state dict inside frees the saved parameters.

    Args:
        model: a model sharded by FSDP2, the root.

    Raises:
        ParallelError: `model` is not sharded by FSDP, or is a part of a model that is.
    """
    root = _root(model)
    units = _units(model)
    # FSDP2 has a setter, but it takes no number of ranks, and there is no getter.
    before = [fsdp_group(unit).post_forward_mesh_info for unit in units]
    seek_scales(model)  # each forward does so before it gathers; here that is now
    try:
        with torch.no_grad():
            for unit in units:
                fsdp_group(unit).post_forward_mesh_info = None
                unit.unshard()
            yield
    finally:
        if _is_in_forward(root):
            _reset_forward(root)  # an exception left it
        for unit, info in zip(units, before, strict=True):
            unit.reshard()
            fsdp_group(unit).post_forward_mesh_info = info
            _forget_forwards(fsdp_group(unit))


def _root(model: nn.Module) -> FSDPModule:
    root = fsdp_module(model, "")
    # Also settles that the root is not freed after the forward unless that was asked for.
    if not settle_fsdp_root(root):
        raise ParallelError(
            f"{class_name(model)} is a module inside a sharded model: give the model itself, whose forward gathers it"
        )
    return root


def _is_replicated(model: nn.Module) -> bool:
    return any(fsdp_group(unit).mesh_info.mesh.ndim > 1 for unit in _units(model))


def _units(model: nn.Module) -> list[FSDPModule]:
    """Return one module of each unit that has parameters."""
    units = {}
    for module in model.modules():
        if isinstance(module, FSDPModule) and fsdp_group(module) is not None:
            units.setdefault(id(fsdp_group(module)), module)
    return list(units.values())


def _is_in_forward(root: FSDPModule) -> bool:  # private: torch FSDPState
    """Whether a forward of `root` has begun and not ended, because an exception left it."""
    return root._get_fsdp_state()._state_ctx.iter_forward_root is not None


def _reset_forward(root: FSDPModule) -> None:  # private: torch FSDPState
    """Let a forward of `root` that an exception left be as if it had not begun."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()  # torch 2.11
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
        if (group := each._fsdp_param_group) is not None:
            group.wait_for_unshard()  # a gather may be under way
            group._training_state = type(group._training_state).IDLE
            group.reshard()
    state._comm_ctx.all_gather_state = None
    state._state_ctx.iter_forward_root = None


def _forget_forwards(group: Any) -> None:  # private: torch FSDPParamGroup
    """Drop the forwards that `group` has recorded: the next backward would gather one unit for them."""
    group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()


def _drop_waiting_gradients(group: Any) -> None:  # private: torch FSDPParamGroup
    """Drop the gradients that `group` holds outside of `.grad`, for a later micro batch."""
    group._partial_reduce_output = None
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        whole = getattr(param, "_unsharded_param", None)  # exists from the first gather on
        if whole is not None:
            whole.grad = None
