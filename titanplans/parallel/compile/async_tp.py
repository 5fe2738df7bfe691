"""Enable async tensor parallelism, and check that collectives were fused.

inductor's pass `micro_pipeline_tp` fuses an all-gather with the matrix products of its output, or a matrix product with the
reduce-scatter of its output, into one operator that sends one chunk while it multiplies another. If it finds no such pair
it leaves the graph unchanged without a message, so `check_fused` counts fused collectives in the compiled graphs.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titanplans.errors import ParallelError
from titanplans.torch_private.compile import (
    ASYNC_TP_SETTING,
    FIRST_PASSES,
    LAST_PASSES,
    custom_passes,
    inductor_config,
    set_custom_passes,
)
from titanplans.torch_private.distributed import enable_symmetric_memory

_log = logging.getLogger(__name__)


class Fused(NamedTuple):
    """Counts of all-gathers and reduce-scatters of the TP group in the compiled graphs; equal blocks count once."""

    fused: int
    overlapped: int
    """Not fused, but independent matrix products run at the same time."""
    total: int


def has_nccl(mesh: Any) -> bool:
    """Whether the ranks of the mesh "tp" have CUDA devices and communicate over NCCL."""
    tp = mesh.get_mesh("tp")
    # A group may have a backend for each device: "cpu:gloo,cuda:nccl".
    return (
        tp.device_type == "cuda" and dist.is_nccl_available() and "nccl" in dist.get_backend(tp.get_group())
    )


def enable(model: nn.Module, mesh: Any) -> None:
    """Let inductor overlap the TP group's collectives with matrix products in the blocks of `model`.

    Call it before the blocks first run. It affects the process: it adds passes to inductor, and a record of the compiled
    graphs, for which it disables inductor's cache.

    Args:
        model: the model, split by its plan.
        mesh: a `Mesh`, or torchtitan's ParallelDims.
    """
    enable_symmetric_memory(mesh.get_mesh("tp").get_group())
    setattr(inductor_config(), ASYNC_TP_SETTING, True)
    install_passes()
    prepare(model)


def install_passes() -> None:
    """Add the passes of `overlap` and the record of the compiled graphs to inductor's hooks, after the user's hooks."""
    # Imported here: their base class is inductor's, which takes two seconds to import.
    from titanplans.observe.graphs import GraphRecord, install_record
    from titanplans.parallel.compile.overlap import Expose, Overlap

    for setting, own in ((FIRST_PASSES, Expose), (LAST_PASSES, Overlap)):
        others = [hook for hook in custom_passes(setting) if not isinstance(hook, own | GraphRecord)]
        records = [hook for hook in custom_passes(setting) if isinstance(hook, GraphRecord)]
        set_custom_passes(setting, [*others, own(), *records])
    install_record()


def prepare(model: nn.Module) -> None:
    """Switch off `fuse_swiglu` in the MLPs of flash-linear-attention, so that their last matrix product can be fused.

    With `fuse_swiglu` the activation and the last product are one function outside of every graph. Computed separately,
    they return the same values, but need more memory: the output of the activation is saved for the backward.
    """
    mlps = [m for m in model.modules() if getattr(m, "fuse_swiglu", None) is True and hasattr(m, "down_proj")]
    for mlp in mlps:
        mlp.fuse_swiglu = False  # pyrefly: ignore[bad-argument-type]
    if mlps:
        _log.info(
            f"Async TP: {len(mlps)} MLPs compute down_proj separately, so that it can be fused (fuse_swiglu = false)"
        )


def check_fused(mesh: Any, unfused: str = "error") -> Fused:
    """Count fused and overlapped collectives in the compiled graphs. Call it after the first forward and backward.

    Args:
        mesh: a `Mesh`, or torchtitan's ParallelDims.
        unfused: "warn": log a warning if nothing was fused, instead of raising an error.

    Raises:
        ParallelError: nothing was fused, or the graphs were not recorded.
    """
    from titanplans.observe.graphs import installed_record

    record = installed_record()
    if record is None:
        raise ParallelError(
            "enable_async_tensor_parallel: inductor's graphs are not recorded, so fused collectives can't be counted: "
            "call async_tp.enable before the first forward, and do not replace "
            "torch._inductor.config.post_grad_custom_post_pass afterwards"
        )
    group = tuple(dist.get_process_group_ranks(mesh.get_mesh("tp").get_group()))
    collectives = [c for c in record.collectives(group) if c.operation in ("all_gather", "reduce_scatter")]
    result = Fused(
        sum(c.fused for c in collectives), sum(c.overlapped for c in collectives), len(collectives)
    )
    if result.fused:
        _log.info(
            f"Async TP: of {result.total} gathers and scatters in the compiled graphs (equal blocks count once) "
            f"{result.fused} are fused with matrix products, {result.overlapped} more overlapped; titanplans async-tp "
            "says why the others are not"
        )
        return result
    unfused_collectives = (
        f"none of {result.total} gathers and scatters" if collectives else "no gather and no scatter"
    )
    message = (
        f"enable_async_tensor_parallel: {unfused_collectives} in {len(record.graphs)} compiled graphs was fused with a "
        "matrix product; titanplans async-tp names each obstacle: remove it, drop the option, or set "
        'async_tensor_parallel_unfused to "warn"'
    )
    if unfused == "error":
        raise ParallelError(message)
    _log.warning(message)
    return result


def check_at_second_forward(model: nn.Module, mesh: Any, unfused: str = "error") -> None:
    """Call `check_fused` at the second forward of `model` in training, for training loops that don't call it."""
    forwards = 0

    def check(module: nn.Module, inputs: Any) -> None:
        nonlocal forwards
        if module.training and torch.is_grad_enabled():
            forwards += 1
        if forwards == 2:
            remove()
            check_fused(mesh, unfused)

    remove: Callable[[], None] = model.register_forward_pre_hook(check).remove
