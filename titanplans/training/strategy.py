"""A job's sections as the strategy that `parallel` takes, and `parallel`'s errors in the words of the job.

What the options do is in `parallel`; which of them contradict each other in a job's words, without torch, is in
`titanplans.config.validate`, and the rest is refused where the strategy is made.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanplans.config import ConfigError, JobConfig
from titanplans.parallel import (
    ActivationCheckpointing,
    Compile,
    DDPConfig,
    Float8,
    FSDP2Config,
    MixedPrecision,
    ParallelError,
)


def strategy(job: JobConfig) -> FSDP2Config | DDPConfig:
    """Return how `job`, checked by `titanplans.config.check_values`, spreads its model.

    Raises:
        ConfigError: two options exclude each other; named by the job's keys.
    """
    with told_by_key():
        return _ddp(job) if job.parallelism.data_parallel_strategy == "ddp" else _fsdp2(job)


@contextmanager
def told_by_key() -> Iterator[None]:
    """Raise `parallel`'s errors as ConfigErrors that name the job's keys in place of options."""
    try:
        yield
    except ParallelError as error:
        raise ConfigError(_OPTIONS.sub(lambda found: _KEYS[found[0]], str(error))) from error


def _fsdp2(job: JobConfig) -> FSDP2Config:
    p, t = job.parallelism, job.training
    assert p.data_parallel_strategy == "fsdp2"
    return FSDP2Config(
        sequence_parallel=p.enable_sequence_parallel,
        loss_parallel=not p.disable_loss_parallel,
        tp_plan=job.model.plan,  # pyrefly: ignore[bad-argument-type]  a dict is invariant in its values
        mixed_precision=MixedPrecision(
            param_dtype=t.mixed_precision_param,
            reduce_dtype=t.mixed_precision_reduce,
            output_dtype=t.mixed_precision_output,
            cast_forward_inputs=t.mixed_precision_cast_inputs,
        ),
        autocast_dtype=t.autocast_dtype,
        float8=_float8(job),
        cpu_offload=t.enable_cpu_offload,
        pin_memory=t.pin_cpu_memory,
        reshard_after_forward=p.fsdp_reshard_after_forward,
        forward_prefetch=p.fsdp_forward_prefetch,
        backward_prefetch=p.fsdp_backward_prefetch,
        towers=p.fsdp_towers,
        symmetric_memory=p.enable_fsdp_symm_mem,
        defer_fsdp_grad_sync=p.fsdp_defer_grad_sync,
        keep_gathered=p.fsdp_keep_gathered,
        activation_checkpointing=_recomputation(job),
        compile=_compile(job),
    )


def _ddp(job: JobConfig) -> DDPConfig:
    t = job.training
    # FSDP2's mixed precision has no counterpart under DDP; autocast is torchtitan's, too.
    computes = "bfloat16" if t.mixed_precision_param == "bfloat16" else None
    return DDPConfig(
        **vars(job.ddp),
        autocast_dtype=t.autocast_dtype or computes,
        float8=_float8(job),
        activation_checkpointing=_recomputation(job),
        compile=_compile(job),
    )


def _float8(job: JobConfig) -> Float8:
    """`recipe_name` is the switch that the section's other keys wait for."""
    float8 = job.quantize.linear.float8
    if float8.recipe_name is None:
        return Float8()
    return Float8(
        recipe=float8.recipe_name,
        filter_fqns=tuple(float8.filter_fqns),
        filter_unaligned=float8.filter_unaligned,
        emulate=float8.emulate,
        fsdp_all_gather=float8.enable_fsdp_float8_all_gather,
        precompute_scales=float8.precompute_float8_dynamic_scale_for_fsdp,
    )


def _recomputation(job: JobConfig) -> ActivationCheckpointing:
    ac = job.activation_checkpoint
    every_nth = ac.mode == "selective" and ac.selective_ac_option != "op"
    drawn = Path(job.job.dump_folder) / "memory_budget_pareto"
    return ActivationCheckpointing(
        mode="every_nth" if every_nth else ac.mode,
        scope=ac.scope,
        every_nth=int(ac.selective_ac_option) if every_nth else ActivationCheckpointing.every_nth,
        matmuls=ac.per_op_sac_matmuls,
        attention=ac.per_op_sac_keep_attention,
        collectives=ac.per_op_sac_keep_collectives,
        operators=tuple(ac.per_op_sac_keep_operators),
        recompute_linears=tuple(ac.per_op_sac_force_recompute_mm_shapes_by_fqns),
        memory_budget=ac.memory_budget,
        pareto_folder=str(drawn) if ac.visualize_memory_budget_pareto else None,
        preserve_rng_state=ac.preserve_rng_state,
        determinism_check=ac.determinism_check,
        early_stop=ac.early_stop,
        debug=ac.debug,
    )


def _compile(job: JobConfig) -> Compile:
    """[compile] enable is the switch that the section's other keys wait for; an option of `parallel` does not wait."""
    if not job.compile.enable:
        return Compile()
    return Compile(
        **vars(job.compile),
        enable_async_tensor_parallel=job.parallelism.enable_async_tensor_parallel,
        async_tensor_parallel_unfused=job.parallelism.async_tensor_parallel_unfused,
    )


def _named(title: str, section: str, names: dict[str, str]) -> dict[str, str]:
    """Return the job's keys by `title.option` and by the option alone."""
    dotted = {f"{title}.{option}": f"{section}.{name}" for option, name in names.items()}
    return dotted | {option: f"{section}.{name}" for option, name in names.items()}


_KEYS = {
    **_named(
        "fsdp2",
        "parallelism",
        {
            "sequence_parallel": "enable_sequence_parallel",
            "reshard_after_forward": "fsdp_reshard_after_forward",
            "forward_prefetch": "fsdp_forward_prefetch",
            "backward_prefetch": "fsdp_backward_prefetch",
            "towers": "fsdp_towers",
            "symmetric_memory": "enable_fsdp_symm_mem",
            "defer_fsdp_grad_sync": "fsdp_defer_grad_sync",
            "keep_gathered": "fsdp_keep_gathered",
        },
    ),
    **_named("fsdp2", "training", {"cpu_offload": "enable_cpu_offload", "pin_memory": "pin_cpu_memory"}),
    **_named("fsdp2", "training", {"autocast_dtype": "autocast_dtype"}),
    **_named("ddp", "training", {"autocast_dtype": "autocast_dtype"}),
    **_named(
        "mixed_precision",
        "training",
        {
            "param_dtype": "mixed_precision_param",
            "reduce_dtype": "mixed_precision_reduce",
            "output_dtype": "mixed_precision_output",
            "cast_forward_inputs": "mixed_precision_cast_inputs",
        },
    ),
    **_named(
        "float8",
        "quantize.linear.float8",
        {
            **{name: name for name in ("emulate", "filter_fqns", "filter_unaligned")},
            "recipe": "recipe_name",
            "fsdp_all_gather": "enable_fsdp_float8_all_gather",
            "precompute_scales": "precompute_float8_dynamic_scale_for_fsdp",
        },
    ),
    **_named(
        "activation_checkpointing",
        "activation_checkpoint",
        {
            **{name: name for name in ("mode", "scope", "preserve_rng_state", "determinism_check")},
            **{name: name for name in ("early_stop", "debug")},
            "matmuls": "per_op_sac_matmuls",
            "attention": "per_op_sac_keep_attention",
            "collectives": "per_op_sac_keep_collectives",
            "operators": "per_op_sac_keep_operators",
            "recompute_linears": "per_op_sac_force_recompute_mm_shapes_by_fqns",
            "pareto_folder": "visualize_memory_budget_pareto",
        },
    ),
    **_named(
        "compile",
        "parallelism",
        {name: name for name in ("enable_async_tensor_parallel", "async_tensor_parallel_unfused")},
    ),
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "activation checkpointing's scope": "activation_checkpoint.scope",
    # Both are a mode, too, which a job has not under that name: it is a number under selective.
    "activation_checkpointing.every_nth": "activation_checkpoint.selective_ac_option",
    "activation_checkpointing.memory_budget": "activation_checkpoint.memory_budget",
    'mode = "every_nth"': 'mode = "selective"',
    "selective, every_nth": "selective",
}
"""The job's words by `parallel`'s."""


def _pattern(words: str) -> str:
    """Return what finds an option's name: one that may be a word of the sentence only before an equals sign."""
    return re.escape(words) + ("(?= = )" if words.isalpha() else "")


_OPTIONS = re.compile(
    r"(?<![\w.\"'])(?:" + "|".join(map(_pattern, sorted(_KEYS, key=len, reverse=True))) + r")(?![\w.])"
)
