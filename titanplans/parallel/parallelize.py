"""The entry in torchtitan's convention: its configs are read by their attributes, and become a strategy.

What is done in which order is in `order`, what excludes what in `interplay`.
"""

from typing import Any

from torch import nn

from titanplans.parallel.compile import async_tp
from titanplans.parallel.order import apply_strategy
from titanplans.parallel.strategies import Compile, FSDP2Config, MixedPrecision
from titanplans.tensor_parallel.custom import PlanSource


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
        parallel_dims: torchtitan's ParallelDims, or a `Mesh`: the degrees, and the meshes "tp" and "fsdp"
            (with "dp_replicate").
        training: `mixed_precision_param`, `mixed_precision_reduce` (names of dtypes) and
            `enable_cpu_offload`.
        parallelism: `enable_sequence_parallel`, `fsdp_reshard_after_forward`, `enable_fsdp_symm_mem`.
        compile_config: `enable`, `components`, `backend`, `enable_async_tensor_parallel`.
        ac_config: what to recompute: a torchtitan ActivationCheckpointing.Config, a policy of
            `titanplans.parallel.activation_checkpoint`, or None for nothing.
        dump_folder: folder for what a step writes.
        loss_parallel: keep the logits sharded over the vocabulary (a DTensor, `Shard(-1)`).
        plan: a plan of the user's own; None for the registered one. See `plans.apply_plan`.

    Raises:
        PlanError: the plan does not fit the model or the degree.
        ParallelError: an option can't be honoured. Both before any weight moves.
    """
    if compile_config.enable_async_tensor_parallel:
        async_tp.refuse(
            mesh=parallel_dims,
            sequence_parallel=parallelism.enable_sequence_parallel,
            blocks=compile_config.enable and "model" in compile_config.components,
            backend=compile_config.backend,
        )
    config = FSDP2Config(
        sequence_parallel=parallelism.enable_sequence_parallel,
        loss_parallel=loss_parallel,
        tp_plan=plan,  # pyrefly: ignore[bad-argument-type]
        mixed_precision=MixedPrecision(
            param_dtype=training.mixed_precision_param, reduce_dtype=training.mixed_precision_reduce
        ),
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        symmetric_memory=parallelism.enable_fsdp_symm_mem,
        compile=_compile(compile_config),
    )
    apply_strategy(model, parallel_dims, config, policy=ac_config, dump_folder=dump_folder)
    return model


def _compile(compile_config: Any) -> Compile:
    if not compile_config.enable:
        return Compile()
    return Compile(
        enable=True,
        components=tuple(compile_config.components),
        backend=compile_config.backend,
        enable_async_tensor_parallel=compile_config.enable_async_tensor_parallel,
    )
