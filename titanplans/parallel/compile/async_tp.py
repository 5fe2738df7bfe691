"""Async tensor parallelism: its requirements, its switch, and a check that something was fused.

inductor's pass `micro_pipeline_tp` replaces an all-gather and the matrix products that read it, or a product and
the reduce-scatter of it, by one operator that works in pieces, so that a piece is sent while another is
multiplied. Where it finds no such pair it leaves the graph unchanged and says nothing. `overlap` lets it
find more, and overlaps the remaining collectives with products that do not wait for them. Both are
counted in the finished graphs (`titanplans.observe.graphs`), and nothing fused is an error. Which collectives
of which model can be fused is decided without a GPU by `titanplans async-tp`.
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
    inductor_config,
    own_passes,
    set_own_passes,
)
from titanplans.torch_private.distributed import enable_symmetric_memory

_log = logging.getLogger(__name__)


class Fused(NamedTuple):
    """Gathers and scatters of the TP group in the compiled graphs, equal blocks counted once."""

    fused: int
    overlapped: int
    """Not fused, and independent products run meanwhile."""
    total: int


def has_nccl(mesh: Any) -> bool:
    """Whether the ranks of the mesh "tp" have CUDA devices and communicate by NCCL."""
    tp = mesh.get_mesh("tp")
    # A group may have a backend for each device: "cpu:gloo,cuda:nccl".
    return (
        tp.device_type == "cuda" and dist.is_nccl_available() and "nccl" in dist.get_backend(tp.get_group())
    )


def enable(model: nn.Module, mesh: Any) -> None:
    """Let inductor overlap the TP group's collectives with matrix products in the blocks of `model`.

    Before the blocks first run. The settings are the process's: inductor's pass, and a record of the finished graphs,
    for which inductor's compile cache is left out.

    Args:
        model: split by its plan.
        mesh: a `Mesh`, or torchtitan's ParallelDims.
    """
    enable_symmetric_memory(mesh.get_mesh("tp").get_group())
    setattr(inductor_config(), ASYNC_TP_SETTING, True)
    install_passes()
    prepare(model)


def install_passes() -> None:
    """Let inductor's pass find more products, overlap the remaining collectives, and record the finished graphs.

    The user's own hooks run before.
    """
    # Not at the top: their class is inductor's, which takes two seconds to import.
    from titanplans.observe.graphs import GraphRecord, install_record
    from titanplans.parallel.compile.overlap import Expose, Overlap

    for setting, own in ((FIRST_PASSES, Expose), (LAST_PASSES, Overlap)):
        others = [hook for hook in own_passes(setting) if not isinstance(hook, own | GraphRecord)]
        records = [hook for hook in own_passes(setting) if isinstance(hook, GraphRecord)]
        set_own_passes(setting, [*others, own(), *records])
    install_record()


def prepare(model: nn.Module) -> None:
    """Let the MLPs of flash-linear-attention in `model` compute their last product by itself.

    With `fuse_swiglu` it is one function with the activation, and out of every graph. One after the other they
    give the same numbers; the activation's result is kept for the backward. That the gathers of such blocks are in
    one graph with their products is `titanplans.parallel.compile.graph_breaks`' matter.
    """
    apart = [
        m for m in model.modules() if getattr(m, "fuse_swiglu", None) is True and hasattr(m, "down_proj")
    ]
    for mlp in apart:
        mlp.fuse_swiglu = False  # pyrefly: ignore[bad-argument-type]
    if apart:
        _log.info(
            f"Async TP: {len(apart)} MLPs compute down_proj by itself, to be fused (fuse_swiglu = false)"
        )


def check_fused(mesh: Any, unfused: str = "error") -> Fused:
    """Count fused and overlapped collectives in the graphs compiled so far; after the first forward and backward.

    Args:
        mesh: a `Mesh`, or torchtitan's ParallelDims.
        unfused: "warn" logs a warning where nothing was fused, instead of raising.

    Raises:
        ParallelError: nothing was fused; or it can't be known.
    """
    from titanplans.observe.graphs import installed_record

    record = installed_record()
    if record is None:
        raise ParallelError(
            "enable_async_tensor_parallel: inductor's graphs are not recorded, so fused collectives can't be counted: "
            "switch it on by async_tp.enable, and append to torch._inductor.config.post_grad_custom_post_pass instead of "
            "replacing it"
        )
    group = tuple(dist.get_process_group_ranks(mesh.get_mesh("tp").get_group()))
    found = [c for c in record.collectives(group) if c.operation in ("all_gather", "reduce_scatter")]
    result = Fused(sum(c.fused for c in found), sum(c.overlapped for c in found), len(found))
    if result.fused:
        _log.info(
            f"Async TP: of {result.total} gathers and scatters in the compiled graphs (equal blocks count once) "
            f"{result.fused} are fused with matrix products, {result.overlapped} more overlapped; titanplans async-tp "
            "says why not the others"
        )
        return result
    there = f"none of {result.total} gathers and scatters" if found else "no gather and no scatter"
    message = (
        f"enable_async_tensor_parallel: {there} in {len(record.graphs)} compiled graphs was fused with a matrix product; "
        "titanplans async-tp names each obstacle: remove it, drop the option, or set "
        'async_tensor_parallel_unfused to "warn"'
    )
    if unfused == "error":
        raise ParallelError(message)
    _log.warning(message)
    return result


def check_at_second_forward(model: nn.Module, mesh: Any, unfused: str = "error") -> None:
    """Call `check_fused` where `model` begins its second training step, for a loop of somebody's own."""
    forwards = 0

    def check(module: nn.Module, inputs: Any) -> None:
        nonlocal forwards
        if module.training and torch.is_grad_enabled():
            forwards += 1
        if forwards == 2:
            remove()
            check_fused(mesh, unfused)

    remove: Callable[[], None] = model.register_forward_pre_hook(check).remove
