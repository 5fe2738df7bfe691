"""The entry: a model on meta becomes a parallel one, step by step, in the order that the steps need.

Each step is a named function in a file of its own; this one only says in which order, and why.
"""

import logging
from collections import Counter
from typing import Any

from torch import nn

from parallel.activation_checkpoint import apply_activation_checkpointing
from parallel.compile import apply_compile, one_graph_a_block
from parallel.data_parallel import apply_fsdp
from parallel.errors import ParallelError
from plans import apply_plan
from plans.custom import PlanSource

_log = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    loss_parallel: bool = True,
    plan: PlanSource = None,
) -> nn.Module:
    """Parallelise `model` in place and return it; torchtitan's `parallelize_fn` convention.

    Args:
        model: a causal language model, normally on meta (token ids [batch, sequence] in, logits out).
        parallel_dims: torchtitan's ParallelDims: the degrees, and the meshes "tp" and "fsdp" (with
            "dp_replicate").
        training: `mixed_precision_param`, `mixed_precision_reduce` (names of dtypes) and
            `enable_cpu_offload`.
        parallelism: `enable_sequence_parallel`, `fsdp_reshard_after_forward`, `enable_fsdp_symm_mem`.
        compile_config: `enable`, `components`, `backend`, `enable_async_tensor_parallel`.
        ac_config: what to recompute: a torchtitan ActivationCheckpointing.Config, an
            `EveryNthLayer`, or None for nothing.
        dump_folder: folder for what a step writes.
        loss_parallel: keep the logits sharded over the vocabulary (a DTensor, `Shard(-1)`).
        plan: a plan of the user's own; None for the registered one. See `plans.apply_plan`.

    Raises:
        PlanError: the plan does not fit the model or the degree.
        ParallelError: an option can't be honoured. Both before any weight moves.
    """
    _refuse(model, parallel_dims, parallelism, compile_config, ac_config, plan)

    # First: a plan names modules as the model has them, and shards whole parameters.
    if parallel_dims.tp_enabled:
        styles = apply_plan(
            model,
            parallel_dims.get_mesh("tp"),
            loss_parallel=loss_parallel,
            sequence_parallel=parallelism.enable_sequence_parallel,
            plan=plan,
        )
        counts = Counter(type(style).__name__ for style in styles.values())
        _log.info(
            f"Tensor parallel {parallel_dims.tp}: " + ", ".join(f"{n} {name}" for name, n in counts.items())
        )

    # Before compile, so that the compiler sees what is recomputed.
    if ac_config is not None:
        apply_activation_checkpointing(model, ac_config, dump_folder)

    # Before FSDP, whose hooks on each block stay outside the compiled graph.
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config, parallel_dims)

    # Last, and always: at degree 1 it shards nothing but still gives mixed precision.
    apply_fsdp(model, parallel_dims, training, parallelism)
    return model


def _refuse(
    model: nn.Module,
    parallel_dims: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    plan: PlanSource,
) -> None:
    for name, degree in (
        ("context", parallel_dims.cp),
        ("pipeline", parallel_dims.pp),
        ("expert", parallel_dims.ep),
    ):
        if degree > 1:
            raise ParallelError(
                f"{name}_parallel_degree = {degree}: this entry parallelises by tensor and data; set it to 1"
            )
    if plan is not None and not parallel_dims.tp_enabled:
        raise ParallelError(
            "a plan is given, but tensor_parallel_degree = 1 splits nothing: raise it, or leave it out"
        )
    compiles = compile_config.enable and "model" in compile_config.components
    if compile_config.enable_async_tensor_parallel:
        _refuse_async_tp(parallel_dims, parallelism, compiles)
    if compiles and ac_config is not None and parallel_dims.tp_enabled and one_graph_a_block(model):
        raise ParallelError(
            "compile, activation checkpointing and tensor_parallel_degree > 1 together fail in torch 2.13 where a block "
            "is one graph (its partitioner miscounts what a DTensor brings along): switch one of the three off"
        )


def _refuse_async_tp(parallel_dims: Any, parallelism: Any, compiles: bool) -> None:
    missing = [
        what
        for what, there in (
            ("tensor_parallel_degree above 1", parallel_dims.tp_enabled),
            ("enable_sequence_parallel", parallelism.enable_sequence_parallel),
            ("[compile] enable with 'model' in its components", compiles),
            (
                "CUDA with NCCL",
                parallel_dims.tp_enabled and parallel_dims.get_mesh("tp").device_type == "cuda",
            ),
        )
        if not there
    ]
    if missing:
        raise ParallelError(
            f"enable_async_tensor_parallel needs {', '.join(missing)}: add what is missing, or drop it"
        )
