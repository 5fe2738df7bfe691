"""Control FSDP2's communication in gradient accumulation (`accumulate`) and in evaluation (`unsharded`).

Both context managers restore the flags of FSDP2, also after an exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanplans.errors import ParallelError
from titanplans.parallel.fsdp.units import fsdp_module
from titanplans.precision.float8.scales import compute_scales
from titanplans.text import class_name
from titanplans.torch_private.fsdp import drop_gradients, fsdp_group, settle_fsdp_root

Defer = Literal["all", "replicas", "nothing"]


@contextmanager
def accumulate(
    model: nn.Module, *, last: bool, defer: Defer = "all", keep_gathered: bool = False
) -> Iterator[None]:
    """Run the forward and backward of one micro batch; gradients are complete after the last one's backward.

        for i, batch in enumerate(batches):
            with accumulate(model, last=i == len(batches) - 1):
                loss_of(model, batch).backward()

    Memory: with "all" every rank holds full gradients until the last backward, in `reduce_dtype` (4 bytes per parameter in
    float32), instead of the full gradients of only one unit. With "replicas" a rank holds only shards of gradients.
    `keep_gathered` adds full parameters in `param_dtype`.

    An exception in the body drops all gradients of the step (`forget_gradients`). To abandon a step between two micro
    batches, call that function.

    Args:
        model: the root of a model sharded by FSDP2.
        last: whether this is the last micro batch before the optimizer's step.
        defer: which reductions wait for the last micro batch. "all": every reduction, so `.grad` is unchanged until then.
            "replicas": under HSDP only the all-reduce over replicas; the reduce-scatter runs in every backward. "nothing":
            no reduction waits. Only the last backward waits until its reductions are complete: after an earlier backward
            `.grad` may be incomplete on a device with streams.
        keep_gathered: keep parameters gathered from one micro batch to the next, so that later forwards gather only the
            units that are resharded between forward and backward.

    Raises:
        ParallelError: `model` is not the root of a model sharded by FSDP, or `defer` can't be honoured.
    """
    root = _root(model)
    if defer not in ("all", "replicas", "nothing"):
        raise ParallelError(f"defer = {defer!r}: take 'all', 'replicas' or 'nothing'")
    if defer == "replicas" and not _is_replicated(model):
        raise ParallelError(
            "defer = 'replicas', but the model has one replica: give FSDP a 2-D mesh, or defer 'all'"
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
        for unit in _units(model):  # FSDP2 does this itself only after a backward that waits for reductions
            _forget_forwards(fsdp_group(unit))


def forget_gradients(model: nn.Module) -> None:
    """Drop all gradients of an abandoned step, including those whose reduction waits for the last micro batch.

    `zero_grad` does not drop gradients that are not reduced yet: FSDP2 holds them outside of `.grad`, and would add them
    to the gradients of the next step.

    Args:
        model: a model sharded by FSDP2.
    """
    for unit in _units(model):
        drop_gradients(fsdp_group(unit))
    model.zero_grad()


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather all parameters once for any number of forwards without gradients, and reshard them at the end.

    Memory: the full parameters in `param_dtype`. Forwards do not see an optimizer's step or a state dict that is loaded in
    the body; saving a state dict in the body reshards the saved parameters.

    Args:
        model: the root of a model sharded by FSDP2.

    Raises:
        ParallelError: `model` is not the root of a model sharded by FSDP.
    """
    root = _root(model)
    units = _units(model)
    # These attributes are private: FSDP2's public setter accepts only a bool, not a number of ranks, and there is no public
    # getter.
    before = [fsdp_group(unit).post_forward_mesh_info for unit in units]
    # Usually a forward computes the float8 scales before it gathers. Here the parameters are gathered before the forward.
    compute_scales(model)
    try:
        with torch.no_grad():
            for unit in units:
                fsdp_group(unit).post_forward_mesh_info = None
                unit.unshard()
            yield
    finally:
        if _is_in_forward(root):
            _reset_forward(root)  # an exception interrupted it
        for unit, info in zip(units, before, strict=True):
            unit.reshard()
            fsdp_group(unit).post_forward_mesh_info = info
            _forget_forwards(fsdp_group(unit))


def _root(model: nn.Module) -> FSDPModule:
    root = fsdp_module(model, "")
    # This also applies FSDP2's default for the root: it is not resharded after the forward unless the user asked for it.
    if not settle_fsdp_root(root):
        raise ParallelError(f"{class_name(model)} is a module inside a sharded model: pass the root module")
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
    """Whether an exception has interrupted a forward of `root`."""
    return root._get_fsdp_state()._state_ctx.iter_forward_root is not None


def _reset_forward(root: FSDPModule) -> None:  # private: torch FSDPState
    """Reset FSDP2's state after an interrupted forward of `root`."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()  # torch 2.11
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
        if (group := each._fsdp_param_group) is not None:
            group.wait_for_unshard()  # an all-gather may still run
            group._training_state = type(group._training_state).IDLE
            group.reshard()
    state._comm_ctx.all_gather_state = None
    state._state_ctx.iter_forward_root = None


def _forget_forwards(group: Any) -> None:  # private: torch FSDPParamGroup
    """Drop the forwards recorded in `group`, which have no backward: the next backward would prefetch a unit for them."""
    group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()
