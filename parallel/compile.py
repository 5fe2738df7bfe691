"""torch.compile, block by block: repeated blocks share one compiled artefact."""

import warnings
from typing import Any

import torch
from torch import nn

from plans.structure import find_decoder


def apply_compile(model: nn.Module, compile_config: Any, parallel_dims: Any) -> None:
    """Compile each block in place; names and parameters stay as they are.

    A block must become one graph, and it is an error if it does not, unless it holds modules of
    flash-linear-attention, whose kernels take themselves out of every graph.
    """
    if compile_config.enable_async_tensor_parallel:
        _enable_async_tp(parallel_dims)
    # Under checkpointing the recomputation would replay Python side effects that a graph can't.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for name in find_decoder(model).layers:
        block = model.get_submodule(name)
        block.compile(backend=compile_config.backend, fullgraph=not _holds_fla(block))


def one_graph_a_block(model: nn.Module) -> bool:
    """Whether every block of `model` can become a single graph."""
    return not any(_holds_fla(model.get_submodule(name)) for name in find_decoder(model).layers)


def _holds_fla(block: nn.Module) -> bool:
    return any(
        cls.__module__.startswith("fla.") for module in block.modules() for cls in type(module).__mro__
    )


def _enable_async_tp(parallel_dims: Any) -> None:
    """Let inductor overlap the TP group's collectives with matrix products."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():  # deprecated, and still what async TP needs: pytorch #193027
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(parallel_dims.get_mesh("tp").get_group().group_name)
    torch._inductor.config._micro_pipeline_tp = True
